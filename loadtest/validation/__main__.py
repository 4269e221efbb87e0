"""Compares the simulator with two real vLLM servers behind the gateway: see ``make validate-sim``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.bench.machine import about_the_run
from loadtest.bench.measures import NotMeasured
from loadtest.processes import ProcessFailed, run_until_signal
from loadtest.profiling.fit import fit_profile
from loadtest.profiling.measure import Measured, Plan, measure
from loadtest.profiling.probe import TIMEOUT_S, Probe, ProbeFailed
from loadtest.progress import Progress
from loadtest.redis_server import RedisNotFound
from loadtest.sim.profile import Profile
from loadtest.stack import Stack, StackFailed
from loadtest.test_model import TEST_SHAPE
from loadtest.validation import live, simulated
from loadtest.validation.comparison import RUNS, Figures, figures, mean_figures, table, verdicts, write_page
from loadtest.validation.workload import ENGINE, INSTANCES, arrivals, rate_for
from loadtest.workloads.workload import Arrival

RESULT = Path("docs/results/validate-sim.json")
PAGE = Path("docs/evaluation.md")
PLAN = Plan(
    prompt_tokens=(4, 32, 64, 128, 256, 400), contexts=(32, 128, 400), batches=(1, 2, 4, 8, 12), repeats=5, steps=48
)
VLLM_BLOCKS = ENGINE.blocks_total + 1
"""One is vLLM's null block, which no request gets."""
POLICIES = ("none", "kvferry")
"""The leader's, in the order of ``RUNS``."""


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.validation", description=__doc__)
    parser.add_argument("--requests", type=int, default=240, help="of a run (default 240)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each policy, in turn (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--no-page", action="store_true", help="leave docs/evaluation.md as it is")
    flags = parser.parse_args()
    began = os.getloadavg()[0]
    try:
        result = await compare(flags, Progress())
    except (StackFailed, ProcessFailed, RedisNotFound, ProbeFailed, NotMeasured) as error:
        print(f"validate-sim: {error}", file=sys.stderr)
        return 1
    about = about_the_run("loadtest.validation")
    about["machine"]["load_average_before"] = began
    result = about | result
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    flags.output.write_text(json.dumps(result, indent=1) + "\n")
    if not flags.no_page:
        write_page(PAGE, result)
    print(table(result))
    return 0


async def compare(flags: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        build_stack(progress) as stack,
        aiohttp.ClientSession(trust_env=False, timeout=timeout, connector=connector) as http,
    ):
        profile, fitted = await measured_profile(stack, http, flags.seed, progress)
        lengths = arrivals(flags.seed, flags.requests, 1.0)
        rate_rps = rate_for(profile, lengths)
        trace = arrivals(flags.seed, flags.requests, rate_rps)
        real = await real_runs(stack, http, trace, flags, progress)
    model = {
        run: figures(simulated.play(profile, trace, moves)) for run, moves in zip(RUNS, (False, True), strict=True)
    }
    means = {run: mean_figures(found) for run, found in real.items()}
    return {
        "workload": {
            "requests": flags.requests,
            "rate_rps": round(rate_rps, 4),
            "seed": flags.seed,
            "repeats": flags.repeats,
            "blocks_total": ENGINE.blocks_total,
            "block_size": ENGINE.block_size,
        },
        "profile": profile.to_json(),
        "fit": fitted,
        "real": means,
        "real_runs": real,
        "simulated": model,
        "verdicts": verdicts(means, model),
    }


def build_stack(progress: Progress) -> Stack:
    """With few blocks, and both thresholds of migration at those of the simulated policy."""
    arguments = [
        *("--num-gpu-blocks-override", str(VLLM_BLOCKS)),
        *("--max-num-seqs", str(ENGINE.batch_max)),
        *("--max-num-batched-tokens", str(ENGINE.step_tokens_max)),
        *("--max-model-len", str(ENGINE.sequence_tokens_max)),
    ]
    return Stack(
        instances=INSTANCES,
        vllm_arguments=arguments,
        gateway_environment={
            "KVFERRY_LOW_FREENESS_STEPS": str(simulated.MIGRATION.low_freeness_steps),
            "KVFERRY_HIGH_FREENESS_STEPS": str(simulated.MIGRATION.high_freeness_steps),
        },
        progress=progress,
    )


async def measured_profile(
    stack: Stack, http: aiohttp.ClientSession, seed: int, progress: Progress
) -> tuple[Profile, dict[str, float]]:
    """Of both servers at the same time, as they will be used: they share the machine."""
    with progress.step("measuring the servers' steps") as step:
        probes = [Probe(http, instance.url, seed + number) for number, instance in enumerate(stack.instances)]
        found: list[Measured] = await asyncio.gather(*(measure(probe, PLAN, step.update) for probe in probes))
    for one in found:
        if one.about.blocks_total != VLLM_BLOCKS:
            raise ProbeFailed(f"a server has {one.about.blocks_total} blocks, and not the {VLLM_BLOCKS} of its flag.")
    fitted = fit_profile(
        "measured",
        [point for one in found for point in one.prefills],
        [point for one in found for point in one.decodes],
        sum(one.round_trip_ms for one in found) / len(found),
    )
    with progress.step("measuring what a move costs"):
        moves = await live.measure_moves(stack, http)
    profile = dataclasses.replace(
        fitted.profile,
        kv_bytes_per_token=TEST_SHAPE.kv_bytes_per_token,
        copy_bytes_per_s=float(f"{moves['copy_bytes_per_s']:.4g}"),
        downtime_base_ms=float(f"{moves['downtime_ms']:.4g}"),
    )
    errors = {
        "prefill_error_share": round(fitted.prefill_error_share, 4),
        "decode_error_share": round(fitted.decode_error_share, 4),
    }
    return profile, errors


async def real_runs(
    stack: Stack, http: aiohttp.ClientSession, trace: list[Arrival], flags: argparse.Namespace, progress: Progress
) -> dict[str, list[Figures]]:
    """In turn, so that a slow minute of the machine falls on both."""
    found: dict[str, list[Figures]] = {run: [] for run in RUNS}
    for number in range(flags.repeats):
        for run, policy in zip(RUNS, POLICIES, strict=True):
            await stack.restart_gateway(policy)
            with progress.step(f"{len(trace)} requests {run}, about {trace[-1].at_s:.0f} s and what is left then"):
                began_s = time.monotonic()
                seen = await live.play(stack, http, trace, flags.seed + 1000 * number)
            found[run].append(figures(seen) | {"duration_s": round(time.monotonic() - began_s, 1)})
    return found


if __name__ == "__main__":
    sys.exit(run_until_signal(main()))
