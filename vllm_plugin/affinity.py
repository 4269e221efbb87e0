"""Where the threads of the KV agent run. Standard library only."""

from __future__ import annotations

import contextlib
import os
import threading

AGENT_NICENESS = 5
"""Added to that of the model's threads: where both want a core, the agent gets about a quarter of it."""


def run_beside_the_model() -> None:
    """Make the calling thread, and those that it starts, the agent's: not bound to the model's core, and nicer.

    vLLM binds a CPU worker's threads to cores, and a thread inherits the binding of the one that starts it. The
    process that started the worker still has the cores that its user allowed. Linux only; elsewhere nothing is done.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # Not allowed, or the parent is gone: the agent works all the same.
        os.sched_setaffinity(thread, os.sched_getaffinity(os.getppid()))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + AGENT_NICENESS)
