import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.processes import ManagedProcess, ProcessFailed, end_all, run_until_signal

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
PARENT_OF_STUBBORN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
print("child", child.pid, flush=True)
child.wait()
"""


def start(tmp_path: Path, code: str, name: str = "child") -> ManagedProcess:
    return ManagedProcess(name, [sys.executable, "-c", code], log=tmp_path / f"{name}.log")


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        os.sched_yield()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, STUBBORN)
    wait_for(lambda: process.log.read_text().endswith("ready\n"))

    process.end(terminate_timeout_s=0.2)

    assert process.exit_status == -signal.SIGKILL


def test_a_child_that_obeys_sigterm_is_not_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")

    process.end(terminate_timeout_s=10)

    assert process.exit_status == -signal.SIGTERM


def test_grandchildren_end_as_well_even_when_their_parent_has_died_first(tmp_path: Path) -> None:
    process = start(tmp_path, PARENT_OF_STUBBORN)
    wait_for(lambda: process.log.read_text().endswith("ready\n"))
    (grandchild,) = map(int, re.findall(r"^child (\d+)$", process.log.read_text(), re.MULTILINE))
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: process.exit_status is not None)
    assert is_alive(grandchild)

    process.end(terminate_timeout_s=0.2)

    assert not is_alive(grandchild)


def test_processes_are_ended_together_and_twice_does_no_harm(tmp_path: Path) -> None:
    processes = [start(tmp_path, STUBBORN, f"child{index}") for index in range(3)]
    for process in processes:
        wait_for(lambda process=process: process.log.read_text().endswith("ready\n"))  # type: ignore[misc]

    started_s = time.monotonic()
    end_all(processes, terminate_timeout_s=0.5)
    end_all(processes, terminate_timeout_s=0.5)

    assert time.monotonic() - started_s < 3 * 0.5 + 1
    assert [process.exit_status for process in processes] == [-signal.SIGKILL] * 3


def test_a_process_that_died_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys; print('no room on device'); sys.exit(3)", "vLLM server a")
    wait_for(lambda: process.exit_status is not None)

    with pytest.raises(ProcessFailed, match=r"(?s)vLLM server a ended with exit status 3.*no room on device"):
        process.require_running()
    process.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_program_clean_up(number: signal.Signals) -> None:
    cleaned_up = []

    async def main() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), number)  # A second one does not cut the cleanup short.
            await asyncio.sleep(0.05)
            cleaned_up.append(True)
        return 0

    assert run_until_signal(main()) == 128 + number
    assert cleaned_up == [True]


def test_the_exit_status_is_passed_on_without_a_signal() -> None:
    async def main() -> int:
        return 7

    assert run_until_signal(main()) == 7


def test_children_end_when_the_program_exits_without_cleaning_up(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    program = start(
        tmp_path,
        "import sys, pathlib\n"
        "from loadtest.processes import ManagedProcess\n"
        f"child = ManagedProcess('child', [sys.executable, '-c', {STUBBORN!r}], log=pathlib.Path({str(log)!r}))\n"
        f"while not pathlib.Path({str(log)!r}).read_text().endswith('ready\\n'): pass\n"
        "print('pid', child.pid, flush=True)\n",
        "program",
    )
    wait_for(lambda: program.exit_status is not None)
    assert program.exit_status == 0, program.log_tail()
    child = int(program.log_tail(1).split()[1])

    wait_for(lambda: not is_alive(child))
    program.end()
    assert not is_alive(child)
