"""What the control plane bears as the cluster grows (`make bench-control`): decisions, the leader's tick, ages, stalls.

Instances that only report (``reporters``), a Redis, and two gateways (``deciding_gateway``), each a process of its own.
The one that leads is asked for decisions at 500 and at 2,000 a second; the other one shows that others see as much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from loadtest.bench.control_result import build_result, describe, row
from loadtest.bench.mock_vllm import MODEL
from loadtest.bench.result import write_result
from loadtest.processes import ProcessFailed, run_until_signal
from loadtest.redis_server import RedisNotFound, RedisServer

RESULT = Path("docs/results/control.json")
QUICK_RESULT = Path(".cache/bench/control-quick.json")
FIRST_PORT = 21_000
"""Below the ports that the kernel gives to clients."""
SETTLE_S = 3.0
"""The lease is taken, and the first reports and probes are over."""
ANSWER_TIMEOUT_S = 120.0
OTHER_DECISIONS_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    instances: tuple[int, ...] = (16, 64, 256)
    decisions_per_s: tuple[float, ...] = (500.0, 2000.0)
    seconds: float = 20.0


FULL = Plan()
QUICK = Plan(seconds=5.0)


class Process:
    """One of ours, that is spoken to by lines. ``async with`` ends it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    @asynccontextmanager
    async def running(
        cls, name: str, arguments: list[str], environment: dict[str, str], log: IO[bytes]
    ) -> AsyncIterator[Process]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
        )
        try:
            yield cls(name, process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise ProcessFailed(f"{self._name} has ended: see its log")
        return line

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self.line())
        return answer


async def measure(count: int, plan: Plan, logs: Path) -> list[tuple[float, list[dict[str, Any]]]]:
    """Speed, and the figures of both gateways, the leader's first."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer(log=logs / "redis.log"))
        log = stack.enter_context((logs / f"processes-{count}.log").open("wb"))
        reporters = await stack.enter_async_context(
            Process.running("reporters", ["loadtest.bench.reporters", str(FIRST_PORT), str(count)], {}, log)
        )
        await reporters.line()
        environment = {
            "KVFERRY_SECRET": secrets.token_urlsafe(12),
            "KVFERRY_REDIS_URL": redis.url,
            "KVFERRY_INSTANCES": ",".join(f"http://127.0.0.1:{FIRST_PORT + number}" for number in range(count)),
        }
        gateways = [
            await stack.enter_async_context(
                Process.running(f"gateway {number}", ["loadtest.bench.deciding_gateway"], environment, log)
            )
            for number in (1, 2)
        ]
        warm_up = asdict(_window(count, OTHER_DECISIONS_PER_S, SETTLE_S))
        first, second = await asyncio.gather(*(one.ask(warm_up) for one in gateways))
        if second["leads"] and not first["leads"]:
            gateways.reverse()
        found = []
        for speed in plan.decisions_per_s:
            asked = [asdict(_window(count, one, plan.seconds)) for one in (speed, OTHER_DECISIONS_PER_S)]
            figures = await asyncio.gather(*(one.ask(ask) for one, ask in zip(gateways, asked, strict=True)))
            found.append((speed, list(figures)))
        return found


@dataclass(frozen=True, slots=True)
class _Question:
    """As ``deciding_gateway.Window``, without importing the gateway."""

    model: str
    instances: int
    decisions_per_s: float
    seconds: float


def _window(count: int, decisions_per_s: float, seconds: float) -> _Question:
    return _Question(MODEL, count, decisions_per_s, seconds)


async def run(arguments: argparse.Namespace) -> int:
    logs = Path(".cache/logs") / time.strftime("bench-control-%Y%m%d-%H%M%S")
    logs.mkdir(parents=True)
    plan = QUICK if arguments.quick else FULL
    if arguments.instances:
        plan = replace(plan, instances=tuple(arguments.instances))
    rows: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    try:
        for count in plan.instances:
            for speed, (leader, other) in await measure(count, plan, logs):
                rows.append(row(count, speed, leader, other))
                windows += [{"instances": count, "leads": one["leads"], **one} for one in (leader, other)]
                print(f"{count} instances, {speed:g} decisions a second: measured", flush=True)
    except (ProcessFailed, RedisNotFound, TimeoutError) as error:
        print(f"error: {error!r}; logs are in {logs}", file=sys.stderr)
        return 1
    result = build_result(rows, windows)
    print(describe(result), flush=True)
    output = arguments.output or (QUICK_RESULT if arguments.quick else RESULT)
    write_result(output, result)
    print(f"\nwritten to {output}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.control", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows: about a minute and a half")
    parser.add_argument("--instances", type=int, nargs="+", metavar="N", help="in place of 16 64 256")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default {RESULT}, with --quick {QUICK_RESULT}")
    return run_until_signal(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
