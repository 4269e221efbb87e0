"""What a move costs the client, on two real vLLM servers (`make bench-migration`).

At each length, in turn: live migration, a copy of all blocks while the request stands still, and no copy at all, where
the destination computes everything again. Then live migrations beside streams that stay where they are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp

from loadtest.bench.cluster import Cluster, StepReports, Stream, build_document
from loadtest.bench.colocated import SIDES, ColocatedSample, Windows
from loadtest.bench.measures import METHODS, NotMeasured, Sample, gaps, gaps_within, last_before, time_move
from loadtest.bench.plot import draw
from loadtest.bench.result import (
    build_result,
    describe,
    describe_colocated,
    describe_sample,
    environment,
    write_result,
)
from loadtest.processes import ProcessFailed, run_until_signal
from loadtest.redis_server import RedisNotFound
from loadtest.stack import BLOCK_SIZE, Stack, StackFailed
from loadtest.test_model import BENCH_MODEL_DIRECTORY, BENCH_SHAPE

T = TypeVar("T")

RESULT = Path("docs/results/migration.json")
FIGURE = Path("docs/migration.svg")
QUICK_RESULT = Path(".cache/bench/migration-quick.json")

SOURCE, DESTINATION = "a", "b"
TOKENS_BEFORE = 24
"""Output tokens before the order; the prompt is shorter by as many."""
TOKENS_AFTER = 24
WARM_UP_TOKENS = 512
TOKENS_MAX = 1_900
ATTEMPTS_MAX = 3
SAMPLE_TIMEOUT_S = 240.0
ORDER_SEED = 11

COLOCATED_STREAMS = 2
"""On either side."""
COLOCATED_PROMPT_TOKENS = 128
COLOCATED_TOKENS_MAX = 8_000
COLOCATED_WINDOW_S = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each length is moved by each method."""

    live: dict[int, int]
    blocking: dict[int, int]
    recompute: dict[int, int]
    """One on 16,384 tokens takes a core about as long as everything else at that length."""
    colocated: dict[int, int]

    @property
    def longest(self) -> int:
        return max(*self.live, *self.colocated)


FULL = Plan(
    live={256: 8, 512: 8, 1024: 8, 2048: 8, 4096: 8, 8192: 8, 16384: 8, 32768: 3},
    blocking={256: 5, 512: 5, 1024: 5, 2048: 5, 4096: 5, 8192: 5, 16384: 5, 32768: 2},
    recompute={256: 5, 512: 5, 1024: 5, 2048: 5, 4096: 3, 8192: 3, 16384: 2},
    colocated={2048: 4, 8192: 4, 16384: 6},
)
QUICK = Plan(
    live={256: 5, 2048: 5, 16384: 5},
    blocking={256: 2, 2048: 2, 16384: 2},
    recompute={256: 2, 2048: 2, 16384: 1},
    colocated={8192: 3},
)


@dataclass(frozen=True, slots=True)
class Run:
    length: int
    method: str


def interleaved(plan: Plan) -> list[Run]:
    """Round by round, each in an order of its own, so that a slow minute of the machine spoils no single figure."""
    left = {Run(length, method): repeats for method in METHODS for length, repeats in getattr(plan, method).items()}
    generator = random.Random(ORDER_SEED)
    rounds = []
    while left:
        this_round = list(left)
        generator.shuffle(this_round)
        rounds += this_round
        left = {run: repeats - 1 for run, repeats in left.items() if repeats > 1}
    return rounds


class Bench:
    """All lengths are beginnings of one document, which the source's prefix cache keeps: it is computed there once.

    The destination's prefix cache is emptied before each move, or there would be nothing to copy.
    """

    def __init__(self, cluster: Cluster, longest: int) -> None:
        self._cluster = cluster
        self._document = build_document(longest)

    async def warm_up(self) -> float:
        """The source computes the document, in so many seconds. A move by each method goes unrecorded."""
        started_s = time.monotonic()
        async with self._cluster.stream(self._prompt(len(self._document)), TOKENS_MAX, SOURCE) as stream:
            await stream.wait_for_tokens(2)
            counted = await self._cluster.prompt_tokens(stream, SOURCE)
        if counted != len(self._document) - TOKENS_BEFORE:
            raise NotMeasured(f"{len(self._document) - TOKENS_BEFORE} words became {counted} tokens")
        document_s = time.monotonic() - started_s
        for method in METHODS:  # What either side does for the first time takes longer.
            with contextlib.suppress(NotMeasured):
                await self.measure(Run(WARM_UP_TOKENS, method))
        return document_s

    async def measure(self, run: Run) -> Sample:
        await self._cluster.forget(DESTINATION)
        async with self._cluster.stream(self._prompt(run.length), TOKENS_MAX, SOURCE) as stream:
            await stream.wait_for_tokens(TOKENS_BEFORE)
            result = await self._cluster.move(stream, DESTINATION, run.method)
            await stream.wait_for_tokens(result["output_tokens"] + TOKENS_AFTER)
            arrivals = list(stream.arrivals)
            computed_tokens = await self._cluster.computed_tokens(stream, DESTINATION)
        copied = result["blocks_sent"] * BENCH_SHAPE.kv_bytes_per_token * BLOCK_SIZE
        if result["blocks_reused"] or result["bytes_sent"] != (copied if run.method != "recompute" else 0):
            raise NotMeasured(f"blocks were not all sent: {result}")
        return Sample(
            length=run.length,
            method=run.method,
            tokens=run.length - TOKENS_BEFORE + result["output_tokens"],
            timing=time_move(arrivals, result["output_tokens"]),
            result=result,
            computed_tokens=computed_tokens,
            gaps_ms=[round(gap, 3) for gap in gaps(arrivals)],
            move_index=next(i for i, (_, total) in enumerate(arrivals) if total > result["output_tokens"]) - 1,
        )

    async def measure_colocated(self, length: int) -> ColocatedSample:
        """Streams that stay decode on either side; a longer one starts beside them, and moves."""
        await self._cluster.forget(DESTINATION)
        async with contextlib.AsyncExitStack() as stack:
            staying: dict[str, list[Stream]] = {}
            for side, instance_id in zip(SIDES, (SOURCE, DESTINATION), strict=True):
                prompts = [
                    "".join(self._document[index * COLOCATED_PROMPT_TOKENS :][:COLOCATED_PROMPT_TOKENS])
                    for index in range(COLOCATED_STREAMS)
                ]
                staying[side] = [
                    await stack.enter_async_context(self._cluster.stream(prompt, COLOCATED_TOKENS_MAX, instance_id))
                    for prompt in prompts
                ]
            reports = {
                side: await stack.enter_async_context(self._cluster.step_reports(instance_id))
                for side, instance_id in zip(SIDES, (SOURCE, DESTINATION), strict=True)
            }
            moving = await stack.enter_async_context(self._cluster.stream(self._prompt(length), TOKENS_MAX, SOURCE))
            await moving.wait_for_tokens(TOKENS_BEFORE)
            begin_s = time.perf_counter()
            await asyncio.sleep(COLOCATED_WINDOW_S)
            order_s = time.perf_counter()
            result = await self._cluster.move(moving, DESTINATION, "live")
            await moving.wait_for_tokens(result["output_tokens"] + TOKENS_AFTER)
            left_s = last_before(moving.arrivals, result["output_tokens"])
            source, destination = (_windows(staying[side], reports[side], begin_s, order_s, left_s) for side in SIDES)
        timing = None
        with contextlib.suppress(NotMeasured):
            timing = time_move(moving.arrivals, result["output_tokens"])
        return ColocatedSample(
            length=length,
            source=source,
            destination=destination,
            bytes=result["bytes_sent"],
            window_ms=round(1000 * (left_s - order_s), 3),
            pause_ms=timing.pause_ms if timing is not None else None,
            destination_gap_ms=timing.destination_gap_ms if timing is not None else None,
        )

    def _prompt(self, length: int) -> str:
        return "".join(self._document[: length - TOKENS_BEFORE])


def _windows(streams: Sequence[Stream], reports: StepReports, begin_s: float, order_s: float, left_s: float) -> Windows:
    def seen(begin_s: float, end_s: float) -> list[float]:
        return [round(gap, 3) for stream in streams for gap in gaps_within(stream.arrivals, begin_s, end_s)]

    return Windows(
        without_ms=seen(begin_s, order_s),
        with_ms=seen(order_s, left_s),
        engine_without_ms=reports.within(begin_s, order_s),
        engine_with_ms=reports.within(order_s, left_s),
    )


VLLM_ARGUMENTS = ("--max-model-len", "34816", "--max-num-batched-tokens", "2048")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 131,072 tokens, four sequences of the greatest length.
    "VLLM_SERVER_DEV_MODE": "1",  # For POST /reset_prefix_cache.
}


class Collection:
    """What was measured so far, and what had to be measured again."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.colocated: list[ColocatedSample] = []
        self.discarded: list[str] = []
        self._started_s = time.monotonic()

    async def collect(self, bench: Bench, plan: Plan) -> None:
        runs = interleaved(plan)
        for number, run in enumerate(runs, 1):
            sample = await self._retried(f"{run.method} at {run.length}", partial(bench.measure, run))
            if sample is not None:
                self.samples.append(sample)
                self._say(f"{number}/{len(runs)}  {describe_sample(sample)}")
        colocated = [length for length, repeats in plan.colocated.items() for _ in range(repeats)]
        for number, length in enumerate(colocated, 1):
            beside = await self._retried(f"beside others at {length}", partial(bench.measure_colocated, length))
            if beside is not None:
                self.colocated.append(beside)
                self._say(f"{number}/{len(colocated)}  {describe_colocated(beside)}")

    async def _retried(self, what: str, measure: Callable[[], Awaitable[T]]) -> T | None:
        """``None`` for a run that was worth nothing however often it was made; the rest goes on without it."""
        for _ in range(ATTEMPTS_MAX):
            try:
                async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                    return await measure()
            except NotMeasured as error:
                self.discarded.append(f"{what}: {error}")
                self._say(f"{what}: not measured, because {error}")
        return None

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:5.0f} s  {text}", flush=True)


async def run(arguments: argparse.Namespace) -> int:
    plan = QUICK if arguments.quick else FULL
    output = arguments.output or (QUICK_RESULT if arguments.quick else RESULT)
    if importlib.util.find_spec("matplotlib") is None:
        print("error: matplotlib, which draws the figure, is missing: pip install 'kvferry[bench]'", file=sys.stderr)
        return 2
    collection = Collection()
    about = environment()
    try:
        async with (
            Stack(
                model_directory=BENCH_MODEL_DIRECTORY,
                vllm_arguments=VLLM_ARGUMENTS,
                vllm_environment=VLLM_ENVIRONMENT,
            ) as stack,
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0), trust_env=False
            ) as http,
        ):
            bench = Bench(Cluster(stack, http), plan.longest)
            print(f"computing {plan.longest:,} tokens once, for the source's prefix cache", flush=True)
            about["prefill_s"] = {"tokens": plan.longest, "seconds": round(await bench.warm_up(), 3)}
            await collection.collect(bench, plan)
    except (StackFailed, ProcessFailed, RedisNotFound, NotMeasured, TimeoutError, aiohttp.ClientError) as error:
        print(f"error: {error!r}", file=sys.stderr)
        return 1
    result = build_result(collection.samples, collection.colocated, collection.discarded, about)
    write_result(output, result)
    print(describe(result), flush=True)
    figure = output.with_suffix(".svg") if output != RESULT else FIGURE
    draw(result, figure)
    print(f"\nwritten to {output} and {figure}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.migration", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three lengths, few repeats: about four minutes")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default {RESULT}, with --quick {QUICK_RESULT}")
    return run_until_signal(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
