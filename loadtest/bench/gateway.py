"""What a gateway costs on the way to vLLM, side by side with others (`make bench-gateway`).

One mock of a vLLM server, one client, and the proxies, each a process of its own and all of them up for the whole run.
Every round measures every mode through every proxy, in an order of its own; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.bench.gateway_result import MODES, Run, build_memory, build_result, describe, describe_memory
from loadtest.bench.load_client import Load
from loadtest.bench.process_tree import cpu_s
from loadtest.bench.proxies import (
    HOST,
    ROUTE,
    STARTERS,
    NotInstalled,
    Place,
    Proxy,
    start_mock,
    wait_until_serving,
)
from loadtest.bench.result import write_result
from loadtest.processes import ManagedProcess, ProcessFailed, end_all, free_port, run_until_signal
from loadtest.redis_server import RedisNotFound, RedisServer

RESULT = Path("docs/results/gateway.json")
QUICK_RESULT = Path(".cache/bench/gateway-quick.json")
QUICK_MEMORY_RESULT = Path(".cache/bench/gateway-memory-quick.json")
MEMORY_RESULT = Path("docs/results/gateway-memory.json")
ORDER_SEED = 13
CLIENT_LINE_BYTES_MAX = 1 << 24
REST_S = 0.2
REST_S_MAX = 8.0
REST_CORES = 0.15
"""After a measurement a proxy may still be busy with what it has left behind: the next one waits for that."""
SLOW = ("litellm",)
"""They need seconds for what the others do at once: twice the time, or there would be nothing to count."""


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    warm_up_s: float
    window_s: float


FULL = Plan(rounds=4, warm_up_s=0.7, window_s=2.2)
QUICK = Plan(rounds=2, warm_up_s=0.5, window_s=1.2)

MEMORY_REQUESTS = 100_000
MEMORY_QUICK_REQUESTS = 10_000
MEMORY_WINDOW_S = 3600.0


class Client:
    """The process that makes the load."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> Client:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "loadtest.bench.load_client"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=CLIENT_LINE_BYTES_MAX,
            )
        )

    async def measure(self, load: Load) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise ProcessFailed("the load client has ended; what it said is above")
        figures: dict[str, Any] = json.loads(line)
        return figures

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Bench:
    """Everything that runs. Ends it all in ``__aexit__``."""

    def __init__(self, names: Sequence[str], logs: Path) -> None:
        self._names = names
        self._logs = logs
        self._started: list[ManagedProcess] = []
        self._stack = ExitStack()
        self.proxies: list[Proxy] = []
        self.missing: dict[str, str] = {}

    async def __aenter__(self) -> Bench:
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _start(self) -> None:
        redis = self._stack.enter_context(RedisServer(log=self._logs / "redis.log"))
        place = Place(free_port(), "", redis.url, self._logs)
        mock = start_mock(place)
        self._started.append(mock)
        mock_url = f"http://{HOST}:{place.port}"
        await wait_until_serving(mock_url, mock)
        self.proxies.append(Proxy("direct", mock_url, mock))
        for name in self._names:
            await self._start_proxy(name, Place(free_port(), mock_url, redis.url, self._logs))
        self.client = await Client.start()

    async def _start_proxy(self, name: str, place: Place) -> None:
        """One of the others may be missing or not start: the run says so, and goes on."""
        try:
            proxy = STARTERS[name](name, place)
        except NotInstalled as error:
            self.missing[name] = str(error)
            print(f"{name}: left out, because {error}", flush=True)
            return
        assert proxy.process is not None
        self._started.append(proxy.process)
        try:
            await wait_until_serving(proxy.url, proxy.process, proxy.authorization)
        except ProcessFailed as error:
            if name.startswith("kvferry"):
                raise
            self.missing[name] = str(error)
            print(f"{name}: left out, because {error}", flush=True)
            return
        self.proxies.append(proxy)

    async def _end(self) -> None:
        try:
            end_all(self._started)
            if hasattr(self, "client"):
                await self.client.end()
        finally:
            self._stack.close()

    async def measure(self, proxy: Proxy, mode: str, plan: Plan) -> dict[str, Any]:
        load = MODES[mode]
        assert proxy.process is not None
        factor = 2 if proxy.name in SLOW else 1
        figures = await self.client.measure(
            Load(
                url=proxy.url + ROUTE,
                pid=proxy.process.pid,
                authorization=proxy.authorization,
                warm_up_s=plan.warm_up_s * factor,
                window_s=plan.window_s * factor,
                **asdict(load),
            )
        )
        proxy.process.require_running()
        await self._rest(proxy.process.pid)
        return figures

    async def _rest(self, pid: int) -> None:
        for _ in range(int(REST_S_MAX / REST_S)):
            before_s = cpu_s(pid)
            await asyncio.sleep(REST_S)
            if cpu_s(pid) - before_s < REST_CORES * REST_S:
                return


async def collect(bench: Bench, plan: Plan) -> list[Run]:
    runs: list[Run] = []
    generator = random.Random(ORDER_SEED)
    begin_s = time.monotonic()
    for number in range(plan.rounds):
        for mode in MODES:
            order = list(bench.proxies)
            generator.shuffle(order)
            runs += [Run(number, proxy.name, mode, await bench.measure(proxy, mode, plan)) for proxy in order]
        print(f"{time.monotonic() - begin_s:5.0f} s  round {number + 1} of {plan.rounds}", flush=True)
    return runs


async def run_memory(logs: Path, requests: int) -> dict[str, Any]:
    """One worker of kvferry under short requests, of which every tenth is left by its client."""
    async with Bench(["kvferry"], logs) as bench:
        proxy = bench.proxies[-1]
        assert proxy.process is not None
        print(f"{requests:,} requests through kvferry", flush=True)
        figures = await bench.client.measure(
            Load(
                url=proxy.url + ROUTE,
                pid=proxy.process.pid,
                authorization=proxy.authorization,
                warm_up_s=0.5,
                window_s=MEMORY_WINDOW_S,
                requests_max=requests,
                leave_every=10,
                **asdict(MODES["short"]),
            )
        )
    return build_memory(figures)


async def run(arguments: argparse.Namespace) -> int:
    logs = Path(".cache/logs") / time.strftime("bench-gateway-%Y%m%d-%H%M%S")
    try:
        if arguments.memory:
            result = await run_memory(logs, MEMORY_QUICK_REQUESTS if arguments.quick else MEMORY_REQUESTS)
            print(describe_memory(result), flush=True)
            output = arguments.output or (QUICK_MEMORY_RESULT if arguments.quick else MEMORY_RESULT)
        else:
            plan = QUICK if arguments.quick else FULL
            async with Bench(arguments.proxies.split(","), logs) as bench:
                versions = {proxy.name: proxy.version for proxy in bench.proxies if proxy.version}
                result = build_result(await collect(bench, plan), bench.missing, versions)
            print(describe(result), flush=True)
            output = arguments.output or (QUICK_RESULT if arguments.quick else RESULT)
    except (ProcessFailed, RedisNotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_result(output, result)
    print(f"\nwritten to {output}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short rounds: about two minutes")
    parser.add_argument("--memory", action="store_true", help="only kvferry's memory, over 100,000 requests")
    parser.add_argument("--proxies", default=",".join(STARTERS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default {RESULT}, with --quick {QUICK_RESULT}")
    return run_until_signal(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
