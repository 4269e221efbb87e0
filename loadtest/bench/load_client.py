"""The client of the gateway's benchmark, a process of its own: one load a line on its input, its figures a line back.

    echo '{"url": ..., "streams": 64, ...}' | python -m loadtest.bench.load_client

It counts what arrives within a window, and compares each token's arrival with the time that the mock wrote into it.
The CPU time of the processes under test is read at both ends of that same window.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from loadtest.bench.measures import quantile
from loadtest.bench.process_tree import cpu_s, memory_bytes

_STAMP = re.compile(rb"t(\d{18})e")
SAMPLES_MAX = 200_000
PHASE_SEED = 5


@dataclass(frozen=True, slots=True)
class Load:
    """``tokens_per_s`` of each stream; 0: as fast as they come. ``pid``: the root of the processes under test."""

    url: str
    streams: int
    tokens: int
    tokens_per_s: int
    prompt_bytes: int
    warm_up_s: float
    window_s: float
    pid: int | None = None
    requests_max: int | None = None
    """Ends the window early."""
    leave_every: int = 0
    """Of so many requests one is left after its first token."""
    model: str = "bench"
    authorization: str = ""


@dataclass(slots=True)
class Figures:
    seconds: float = 0.0
    requests: int = 0
    events: int = 0
    failures: list[str] = field(default_factory=list)
    cpu_s: float | None = None
    token_ms_p50: float | None = None
    token_ms_p99: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p99: float | None = None
    memory: list[list[int]] = field(default_factory=list)
    """(requests so far, resident bytes of the processes under test)."""


def request_bytes(load: Load) -> bytes:
    words = "the quick brown fox jumps over the lazy dog\n"
    prompt = (words * (load.prompt_bytes // len(words) + 1))[: load.prompt_bytes]
    body = json.dumps(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": load.tokens,
            "stream": True,
            "user": str(load.tokens_per_s),
        }
    ).encode()
    parts = urlsplit(load.url)
    head = [f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}", "content-type: application/json"]
    head += [f"authorization: Bearer {load.authorization}"] if load.authorization else []
    head += [f"content-length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class Window:
    """What is counted, while it is open."""

    def __init__(self) -> None:
        self.open = False
        self.requests = 0
        self.requests_ever = 0
        self.events = 0
        self.token_ns: list[int] = []
        self.ttft_ns: list[int] = []
        self.failures: list[str] = []
        self.requests_max: int | None = None
        self.full = asyncio.Event()

    def ended(self) -> None:
        self.requests_ever += 1
        self.requests += self.open
        if self.requests_max is not None and self.requests_ever >= self.requests_max:
            self.full.set()


class Slot(asyncio.Protocol):
    """One connection, and one stream after another on it."""

    def __init__(self, request: bytes, load: Load, window: Window, number: int) -> None:
        self._request = request
        self._load = load
        self._window = window
        self._number = number
        self._parts: list[bytes] = []
        self._rest = b""
        self._status = 0
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._begin()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._rest, self._first, self._complete = b"", True, False
        self._number += 1
        self._asked_ns = time.monotonic_ns()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            return
        text = self._rest + b"".join(self._parts)
        self._parts.clear()
        stamps = _STAMP.findall(text)
        if not stamps:
            self._rest = text[-4096:]
        else:
            self._rest = text[text.rfind(stamps[-1]) + len(stamps[-1]) + 1 :]
            self._took(stamps, now_ns)
        if self._complete and self._status == 200:
            self._window.ended()
            self._begin()
        elif self._complete:
            self._fail(f"HTTP {self._status}: {text[:200]!r}")

    def _took(self, stamps: list[bytes], now_ns: int) -> None:
        window = self._window
        if window.open:
            window.events += len(stamps)
            if len(window.token_ns) < SAMPLES_MAX:
                window.token_ns += [now_ns - int(stamp) for stamp in stamps]
        if self._first and (window.open or self._load.tokens_per_s):  # Paced streams begin while it warms up.
            window.ttft_ns.append(now_ns - self._asked_ns)
        self._first = False
        if self._load.leave_every and self._number % self._load.leave_every == 0:
            self._window.ended()
            self.transport.abort()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._complete = True
        self._status = self._parser.get_status_code()

    def _fail(self, why: str) -> None:
        if len(self._window.failures) < 20:
            self._window.failures.append(why)
        self.transport.abort()


async def _run_slot(load: Load, request: bytes, window: Window, number: int, begin_s: float) -> None:
    """For ever: a connection that ends is made anew."""
    parts = urlsplit(load.url)
    assert parts.hostname is not None
    assert parts.port is not None
    loop = asyncio.get_running_loop()
    await asyncio.sleep(begin_s)
    while True:
        try:
            _, slot = await loop.create_connection(
                partial(Slot, request, load, window, number), parts.hostname, parts.port
            )
        except OSError as error:
            if len(window.failures) < 20:
                window.failures.append(str(error))
            await asyncio.sleep(0.1)
            continue
        try:
            await slot.lost.wait()
        finally:
            slot.transport.abort()
        number = slot._number


async def measure(load: Load) -> Figures:
    request, window = request_bytes(load), Window()
    window.requests_max = load.requests_max
    generator = random.Random(PHASE_SEED)
    slots = [
        asyncio.create_task(_run_slot(load, request, window, number, generator.uniform(0, load.warm_up_s)))
        for number in range(load.streams)
    ]
    try:
        await asyncio.sleep(load.warm_up_s)
        cpu_before_s, begin_s = _cpu_s(load), time.monotonic()
        window.open = True
        memory = await _wait(load, window, begin_s)
        window.open = False
        seconds, cpu_after_s = time.monotonic() - begin_s, _cpu_s(load)
    finally:
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
    used_s = None if cpu_after_s is None or cpu_before_s is None else cpu_after_s - cpu_before_s
    figures = Figures(seconds, window.requests, window.events, window.failures, used_s, memory=memory)
    if window.token_ns:
        figures.token_ms_p50, figures.token_ms_p99 = (quantile(window.token_ns, p) / 1e6 for p in (0.5, 0.99))
    if window.ttft_ns:
        figures.ttft_ms_p50, figures.ttft_ms_p99 = (quantile(window.ttft_ns, p) / 1e6 for p in (0.5, 0.99))
    return figures


async def _wait(load: Load, window: Window, begin_s: float) -> list[list[int]]:
    """Until the window ends; the memory is looked at now and then where the number of requests is what counts."""
    if load.requests_max is None or load.pid is None:
        await asyncio.sleep(load.window_s)
        return []
    memory: list[list[int]] = []
    while not window.full.is_set() and time.monotonic() - begin_s < load.window_s:
        memory.append([window.requests_ever, memory_bytes(load.pid)])
        await asyncio.sleep(0.5)
    memory.append([window.requests_ever, memory_bytes(load.pid)])
    return memory


def _cpu_s(load: Load) -> float | None:
    return None if load.pid is None else cpu_s(load.pid)


async def main() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        fields: dict[str, Any] = json.loads(line)
        figures = await measure(Load(**fields))
        print(json.dumps(asdict(figures)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
