"""A whole gateway without its port, and in its event loop a driver that asks for decisions and measures what they take.

    KVFERRY_...=... python -m loadtest.bench.deciding_gateway

Two cores do not bear 2,000 HTTP requests a second beside 256 instances, and it is the decisions that are asked about:
the driver calls what a request calls (``Waiting.start`` and ``Dispatcher.hold``). Each line of its input is a
:class:`Window`; each is answered by one line of figures. The only part of ``loadtest`` that imports the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from gateway.app import Gateway
from gateway.config import read_settings
from gateway.server import GARBAGE_OBJECTS
from gateway.wire import PriorityClass
from loadtest.bench.control_result import bucket_quantiles_ms, quantiles_ms
from loadtest.bench.reporters import allow_many_connections

PACE_S = 0.002
LAG_S = 0.01
AGE_S = 0.05
HELD_S = 0.2
"""How long a request that was decided about counts as being there."""
READY_TIMEOUT_S = 60.0
BODY_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Window:
    model: str
    instances: int
    decisions_per_s: float
    seconds: float


class Driver:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._number = 0
        self._held: deque[tuple[float, Callable[[], None]]] = deque()
        self.decision_s: list[float] = []
        self.lag_s: list[float] = []
        self.age_s: list[float] = []

    async def decide(self, window: Window) -> None:
        """At an even pace, whatever the decisions take: those that are late are made up for at once."""
        began_at = time.monotonic()
        made = 0
        while (elapsed_s := time.monotonic() - began_at) < window.seconds:
            for _ in range(int(elapsed_s * window.decisions_per_s) - made):
                made += 1
                await self._decide_one(window.model)
            self._release(time.monotonic() - HELD_S)
            await asyncio.sleep(PACE_S)
        self._release(float("inf"))

    async def _decide_one(self, model: str) -> None:
        self._number += 1
        waiting, dispatcher = self._gateway.waiting, self._gateway.dispatcher
        began_s = time.perf_counter()
        ticket = waiting.ticket(f"decision-{self._number}", model, PriorityClass.NORMAL, BODY_BYTES, "")
        instance = await waiting.start(ticket)
        release = dispatcher.hold(instance.instance_id, BODY_BYTES)
        self.decision_s.append(time.perf_counter() - began_s)
        self._held.append((time.monotonic(), release))

    def _release(self, until: float) -> None:
        while self._held and self._held[0][0] <= until:
            self._held.popleft()[1]()

    async def watch_loop(self) -> None:
        while True:
            asked_at = time.monotonic()
            await asyncio.sleep(LAG_S)
            self.lag_s.append(max(0.0, time.monotonic() - asked_at - LAG_S))

    async def watch_ages(self) -> None:
        """Of what this gateway would decide by, from when the instance made it."""
        while True:
            await asyncio.sleep(AGE_S)
            now_ns = time.monotonic_ns()
            reports = [member.report for member in self._gateway.members.all()]
            self.age_s += [(now_ns - one.sequence) / 1e9 for one in reports if one is not None]


async def measure(gateway: Gateway, window: Window) -> dict[str, Any]:
    counters, driver = gateway.counters, Driver(gateway)
    ticks = {name: counters.distribution(name) for name in ("leader_work_seconds", "leader_tick_seconds")}
    before = {name: list(one.counts) for name, one in ticks.items()}
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    watches = [asyncio.create_task(driver.watch_loop()), asyncio.create_task(driver.watch_ages())]
    try:
        await driver.decide(window)
    finally:
        for watch in watches:
            watch.cancel()
    took_s = time.monotonic() - began_s
    counts = {
        name: [new - old for new, old in zip(one.counts, before[name], strict=True)] for name, one in ticks.items()
    }
    return {
        "leads": gateway.leader.is_leading,
        "cpu_cores": (time.process_time() - began_cpu_s) / took_s,
        "decisions_per_s": len(driver.decision_s) / took_s,
        "decision_ms": quantiles_ms(driver.decision_s),
        "loop_lag_ms": quantiles_ms(driver.lag_s),
        "age_ms": quantiles_ms(driver.age_s),
        "leader_work_ms": bucket_quantiles_ms(ticks["leader_work_seconds"].bounds, counts["leader_work_seconds"]),
        "leader_tick_ms": bucket_quantiles_ms(ticks["leader_tick_seconds"].bounds, counts["leader_tick_seconds"]),
    }


async def wait_until_known(gateway: Gateway, window: Window) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while len(gateway.dispatcher.lineup(window.model)) < window.instances:
            await asyncio.sleep(0.1)


async def main() -> None:
    allow_many_connections()
    gateway = Gateway(read_settings(argparse.Namespace(), os.environ))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await gateway.start()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)  # As a gateway's server does.
    try:
        while line := await reader.readline():
            window = Window(**json.loads(line))
            await wait_until_known(gateway, window)
            print(json.dumps(await measure(gateway, window)), flush=True)
    finally:
        await gateway.stop()


if __name__ == "__main__":
    uvloop.run(main())
