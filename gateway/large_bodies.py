"""Large request bodies are parsed in a process of their own.

A JSON parser holds Python's lock from the first byte to the last, in whichever thread it runs: everyone else's stream
would stand still. For tens of milliseconds a megabyte, where that is numbers or messages; text is read at 10 ms a
megabyte. Handing the bytes to another process and back costs some 6 ms of CPU time, so that is for what would take
longer than a few.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from gateway.telemetry import log

SMALL_BODY_BYTES = 128 * 1024
"""Up to here nothing takes long, whatever it is."""
TEXT_BYTES_MAX = 512 * 1024
VALUES_MAX = 16_000
"""As told by the commas, of which a text has some too."""
PROCESSES = 1

Parsed = TypeVar("Parsed")


class LargeBodies:
    """The process is started with the first large body, and ends with the gateway."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def parse(self, parse: Callable[[bytes], Parsed], raw: bytes) -> Parsed:
        """``parse(raw)``. Both the function and what it returns or raises must be fit for pickling."""
        if not takes_long(raw):
            return parse(raw)
        loop = asyncio.get_running_loop()
        pool = self._processes()
        try:
            return await loop.run_in_executor(pool, parse, raw)
        except BrokenProcessPool:  # It was killed, as for want of memory: slow is better than not at all.
            log("body_process_lost")
            if self._pool is pool:  # Else another request has seen it first, and the next process works already.
                self.close()
            return parse(raw)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _processes(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(PROCESSES, mp_context=context, initializer=_begin)
        return self._pool


def takes_long(raw: bytes) -> bool:
    return len(raw) >= SMALL_BODY_BYTES and (len(raw) > TEXT_BYTES_MAX or raw.count(b",") > VALUES_MAX)


def _begin() -> None:
    """Signals of the terminal or of a service manager are for the gateway, which ends this process when it is done;
    and if it is killed first, this process ends by itself."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
