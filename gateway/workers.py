"""Several processes on one port: ``kvferry serve --workers N``.

Python runs on one core, so a machine with more of them needs more processes. Each is a whole gateway, a replica like
one on another machine: its own connections to the instances, its own view, and a part in the election of the leader,
all over the same Redis. The kernel spreads new connections over their sockets (SO_REUSEPORT).

The parent makes the sockets, and keeps them: a worker that dies is started again on the same one, so that what has
connected meanwhile is served after all. It runs no event loop and no gateway of its own. Beside the port there is one
Unix socket a worker, a new one at each start, for its siblings (worker_pages.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gateway.telemetry import log
from gateway.worker_pages import Seat

WORKER_VARIABLE = "KVFERRY_WORKER"
"""To a worker, from its parent, as JSON: the numbers of the socket that it is to listen on, and of a pipe that ends
with it; and its seat."""
LOOK_S = 0.1
FAILED_START_S = 60.0
"""A worker that gives up within this time of its start would not come up the next time either."""
RESTART_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker gets from its parent."""

    listening: socket.socket
    seat: Seat


def given_place() -> Place | None:
    """``None`` in any other process. The worker ends when its parent does, however."""
    given = os.environ.get(WORKER_VARIABLE, "")
    if not given.startswith("{"):  # Else it is a slip of somebody who meant KVFERRY_WORKERS.
        return None
    del os.environ[WORKER_VARIABLE]
    place = json.loads(given)
    threading.Thread(target=_end_with, args=(place["pipe"],), daemon=True).start()
    seat = Seat(place["index"], tuple(place["paths"]), socket.socket(fileno=place["own"]))
    return Place(socket.socket(fileno=place["listening"]), seat)


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)  # Nothing is ever written: this returns when the last writer, the parent, is gone.
    os.kill(os.getpid(), signal.SIGTERM)


def run_workers(host: str, port: int, workers: int, arguments: Sequence[str], end_s: float) -> int:
    """Until a signal ends it: the exit status. ``end_s``: how long a worker may take to end before it is killed."""
    try:
        sockets = listen(host, port, workers)
    except OSError as error:
        say_cannot_listen(host, port, error)
        return 1
    try:
        return Workers(sockets, [sys.executable, "-m", "gateway", *arguments], end_s).run()
    except OSError as error:  # No process, or no socket in the directory for temporary files.
        print(f"kvferry: cannot start a worker: {error.strerror or error}", file=sys.stderr)
        return 1


def say_cannot_listen(host: str, port: int, error: OSError) -> None:
    print(f"kvferry: cannot listen on {host}:{port}: {error.strerror or error}", file=sys.stderr)


def listen(host: str, port: int, workers: int) -> list[socket.socket]:
    """One socket a worker, all on one port. Another server on that port is an error, although it could be shared."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        bound = probe.getsockname()
    sockets = []
    for _ in range(workers):
        one = socket.socket(family, socket.SOCK_STREAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(bound)
        sockets.append(one)
    return sockets


def _unix_socket(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.bind(path)
    except OSError:
        one.close()
        raise
    return one


class Workers:
    """The parent. A signal reaches the workers only through it: they lead no terminal's process group."""

    def __init__(self, sockets: Sequence[socket.socket], command: Sequence[str], end_s: float) -> None:
        self._sockets = sockets
        self._command = list(command)
        self._end_s = end_s
        self._ending: signal.Signals | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started_at = [0.0] * len(sockets)
        self._pipe, self._pipe_end = os.pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="kvferry-")
        self._paths = [str(Path(self._directory.name) / str(index)) for index in range(len(sockets))]

    def run(self) -> int:
        before = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        processes = self._processes
        try:
            processes += [self._start(index) for index in range(len(self._sockets))]
            while self._ending is None:
                for index, process in enumerate(processes):
                    if (status := process.poll()) is None:
                        continue
                    log("worker_ended", worker=index, process=process.pid, status=status)
                    gave_up = status > 0  # Else a signal ended it.
                    if gave_up and time.monotonic() - self._started_at[index] < FAILED_START_S:
                        return 1
                    time.sleep(RESTART_S)
                    processes[index] = self._start(index)
                time.sleep(LOOK_S)
            return 0
        finally:
            self._end_all(processes)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._pipe)
            os.close(self._pipe_end)
            self._directory.cleanup()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with _unix_socket(self._paths[index]) as own:
            numbers = {"listening": self._sockets[index].fileno(), "pipe": self._pipe, "own": own.fileno()}
            place = json.dumps({**numbers, "index": index, "paths": self._paths})
            environment = {**os.environ, WORKER_VARIABLE: place}
            self._started_at[index] = time.monotonic()
            return subprocess.Popen(self._command, env=environment, pass_fds=[*numbers.values()], process_group=0)

    def _end(self, number: int, _: FrameType | None) -> None:
        """A second signal is for the workers at once."""
        if self._ending is not None:
            for process in self._processes:
                process.send_signal(number)
        self._ending = signal.Signals(number)

    def _end_all(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for one in self._sockets:
            one.close()  # From now on a worker that closes its door closes it for good.
        for process in processes:
            if process.poll() is None:
                process.send_signal(self._ending or signal.SIGTERM)
        deadline = time.monotonic() + self._end_s
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
