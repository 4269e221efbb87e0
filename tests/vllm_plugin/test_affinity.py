"""Where the KV agent's threads run, beside a model whose thread is bound to one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound to cores on Linux only")

SCRIPT = """
import json, os, threading
from concurrent.futures import ThreadPoolExecutor
from vllm_plugin.affinity import AGENT_NICENESS, run_beside_the_model

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
seen = {}

def look(name):
    thread = threading.get_native_id()
    seen[name] = [sorted(os.sched_getaffinity(thread)), os.getpriority(os.PRIO_PROCESS, thread)]

def agent():
    run_beside_the_model()
    with ThreadPoolExecutor(1) as child:
        child.submit(look, "agent").result()

before = os.getpriority(os.PRIO_PROCESS, 0)
thread = threading.Thread(target=agent)
thread.start()
thread.join()
look("model")
print(json.dumps({**seen, "before": before, "niceness": AGENT_NICENESS}))
"""


def test_the_agents_threads_leave_the_models_core_and_stand_back_behind_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    allowed = sorted(os.sched_getaffinity(0))
    assert seen["model"] == [allowed[:1], seen["before"]]
    assert seen["agent"] == [allowed, min(19, seen["before"] + seen["niceness"])]
