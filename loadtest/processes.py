"""Child processes that leave nothing behind: each leads its own process group, which is ended as a whole.

Ending is synchronous on purpose: a cancelled task or a second Ctrl-C cannot cut it short half way.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_INTERVAL_S = 0.05
TERMINATE_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 5.0
SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessFailed(RuntimeError):
    """A child process did not start, or ended when it should not have. Holds the end of its log."""


class ManagedProcess:
    """A child that leads a process group of its own and writes to ``log``."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None):
        self.name = name
        self.command = list(command)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            output.write(f"$ {shlex.join(self.command)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                self.command,
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Not a session of its own: Linux shares the cores between sessions first (sched(7), autogroups), and
                # how nice a process is would then count for nothing beside the gateway and the client.
                process_group=0,
            )
        # For exits that skip every context manager; `end` takes it out again.
        atexit.register(self._signal_group, signal.SIGKILL)

    def __repr__(self) -> str:
        state = "running" if self.exit_status is None else f"exit status {self.exit_status}"
        return f"<{self.name}: process {self.pid}, {state}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """``None`` while it runs; negative: ended by that signal."""
        return self._process.poll()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def require_running(self) -> None:
        if self.exit_status is not None:
            raise ProcessFailed(
                f"{self.name} ended with exit status {self.exit_status}; the end of {self.log}:\n{self.log_tail()}"
            )

    def end(self, terminate_timeout_s: float = TERMINATE_TIMEOUT_S) -> None:
        end_all([self], terminate_timeout_s)

    def _signal_group(self, number: signal.Signals) -> None:
        # The group outlives its leader as long as a member is left, and its id is not given out again until then.
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left.
            return

    def _is_gone(self) -> bool:
        if self._process.poll() is None:  # The leader is ours to reap.
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return not _has_living_member(self.pid)


def _has_living_member(group: int) -> bool:
    """Whether a process of the group runs: zombies that nobody reaps do not count (Linux; elsewhere assume it)."""
    proc = Path("/proc")
    if not (proc / "self/stat").exists():
        return True
    for stat in proc.glob("[0-9]*/stat"):
        try:
            # pid (name, may hold spaces and brackets) state ppid pgrp ...
            state, _, group_id = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # It ended between the two looks.
            continue
        if int(group_id) == group and state not in "ZX":
            return True
    return False


def end_all(processes: Iterable[ManagedProcess], terminate_timeout_s: float = TERMINATE_TIMEOUT_S) -> None:
    """End the process groups together: SIGTERM, then SIGKILL for those that are left. Safe to call twice."""
    left = list(processes)
    for process in left:
        atexit.unregister(process._signal_group)
    for number, timeout_s in ((signal.SIGTERM, terminate_timeout_s), (signal.SIGKILL, KILL_TIMEOUT_S)):
        for process in left:
            process._signal_group(number)
        deadline = time.monotonic() + timeout_s
        while (left := [process for process in left if not process._is_gone()]) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        if not left:
            return
    raise ProcessFailed(f"could not end {', '.join(map(repr, left))}: end them by hand")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. Another process may still take it before its user does."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def run_until_signal(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` and return its exit status. SIGINT, SIGTERM and SIGHUP cancel it once, so that it cleans up."""

    async def supervise() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)
        received: list[signal.Signals] = []

        def cancel_once(number: signal.Signals) -> None:
            if not received:
                task.cancel()
            received.append(number)

        for number in SHUTDOWN_SIGNALS:
            loop.add_signal_handler(number, cancel_once, number)
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]

    return asyncio.run(supervise())
