"""``kvferry simulate``: one workload, one cluster, one policy; what its users would have felt.

kvferry simulate --trace M-M --rate 7.5 --policy kvferry
kvferry simulate --trace azure2023_conv.csv --speed 1.5 --policy llumnix --json result.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.policy.policies import POLICIES
from loadtest.paper import parameters
from loadtest.progress import Progress
from loadtest.sim.cluster import ClusterSettings
from loadtest.sim.engine import EngineError, EngineSettings, Prefill
from loadtest.sim.node import Record
from loadtest.sim.profile import PRESETS, ProfileError, load_profile
from loadtest.sim.run import Result, simulate
from loadtest.workloads.workload import TRACES, Arrival, WorkloadError, generate, read_trace

ROWS = (
    ("first token, s", "prefill", "s"),
    ("decode, ms a token", "decode", "s_per_token"),
    ("request, s", "request", "s"),
)
SHARES = ("mean", "p50", "p90", "p99", "p999", "max")
MORE = (
    "largest_prefill_mean_s",
    "preemption_loss_mean_s",
    "preemptions",
    "moves_per_request",
    "moved_over_3_share",
    "moves_undone_share",
    "fragmentation_mean_share",
    "instance_hours",
    "duration_s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("workload")
    names = ", ".join(TRACES)
    load.add_argument("--trace", default="M-M", help=f"{names}, or a CSV file (default M-M)")
    load.add_argument("--rate", type=float, help="requests a second (default: the paper's highest for the trace)")
    load.add_argument("--cv", type=float, default=1.0, help="of the gaps between arrivals; 1, the default, is Poisson")
    load.add_argument("--requests", type=int, default=parameters.REQUESTS, help="how many (default 10000)")
    load.add_argument("--seed", type=int, default=1, help="of lengths, arrivals and classes (default 1)")
    load.add_argument("--high-share", type=float, default=0.0, help="share of high priority (default 0)")
    load.add_argument("--speed", type=float, default=1.0, help="of a file's arrivals (default 1)")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--policy", default="kvferry", choices=sorted(POLICIES), help="default kvferry")
    cluster.add_argument("--instances", type=int, default=parameters.INSTANCES, help="default 16")
    cluster.add_argument(
        "--profile", default="llama-7b-a10", help=f"step times: {', '.join(PRESETS)} or a JSON file (default the first)"
    )
    cluster.add_argument("--kv-blocks", type=int, default=parameters.BLOCKS, help="of an instance (default 851)")
    cluster.add_argument("--block-size", type=int, default=parameters.BLOCK_SIZE, help="in tokens (default 16)")
    cluster.add_argument("--batch", type=int, default=256, help="requests at a time in an instance (default 256)")
    cluster.add_argument("--step-tokens", type=int, default=12_800, help="of a step at most (default 12800)")
    cluster.add_argument("--sequence-tokens", type=int, default=12_800, help="prompt and output (default 12800)")
    cluster.add_argument(
        "--prefill", default="whole_prompt", choices=[str(one) for one in Prefill], help="default whole_prompt"
    )
    cluster.add_argument("--report-interval-ms", type=float, default=100.0, help="default 100")
    cluster.add_argument("--headroom-blocks", type=int, help="kept where high priority runs (default as the paper)")
    parser.add_argument(
        "--json", metavar="FILE", help="write all figures there; - is standard output, without the table"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the first tokens' distribution (needs the bench extra)")
    parser.set_defaults(run=run)
    parser.epilog = "example:\n  kvferry simulate --trace M-M --rate 7.5 --policy llumnix"


def run(flags: argparse.Namespace) -> int:
    try:
        arrivals = workload(flags)
        settings = cluster(flags)
        began_s = time.monotonic()
        with Progress().step(f"{len(arrivals):,} requests on {flags.instances} instances under {flags.policy}") as step:
            result = simulate(settings, arrivals, tell=lambda share: step.update(bar(share)))
    except (WorkloadError, EngineError, ProfileError) as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 2
    about = {name: value for name, value in sorted(vars(flags).items()) if name in ABOUT}
    document = about | result.figures | {"simulated_in_s": round(time.monotonic() - began_s, 2)}
    if flags.plot:
        draw(Path(flags.plot), result.records, flags.policy)
    if flags.json == "-":
        print(json.dumps(document, indent=1))
        return 0
    if flags.json:
        Path(flags.json).write_text(json.dumps(document, indent=1) + "\n")
    print(table(result))
    return 0


ABOUT = ("trace", "rate", "cv", "requests", "seed", "policy", "instances", "profile", "prefill", "report_interval_ms")


def workload(flags: argparse.Namespace) -> Sequence[Arrival]:
    if flags.trace not in TRACES and Path(flags.trace).suffix == ".csv":
        arrivals = read_trace(Path(flags.trace), speed=flags.speed, count=flags.requests)
    else:
        rate_rps = flags.rate if flags.rate is not None else parameters.TOP_RATES_RPS.get(flags.trace, 1.0)
        arrivals = generate(
            flags.trace,
            rate_rps=rate_rps,
            count=flags.requests,
            seed=flags.seed,
            cv=flags.cv,
            high_priority_share=flags.high_share,
        )
    if not arrivals:
        raise WorkloadError("The workload has no requests.")
    longest = max(one.prompt_tokens + one.output_tokens for one in arrivals)
    if longest > flags.sequence_tokens:
        raise WorkloadError(f"A request has {longest:,} tokens: raise --sequence-tokens.")
    return arrivals


def cluster(flags: argparse.Namespace) -> ClusterSettings:
    if flags.instances < 1 or flags.report_interval_ms <= 0:
        raise WorkloadError("There must be an instance, and it must report.")
    engine = EngineSettings(
        block_size=flags.block_size,
        blocks_total=flags.kv_blocks,
        batch_max=flags.batch,
        step_tokens_max=flags.step_tokens,
        sequence_tokens_max=flags.sequence_tokens,
        prefill=Prefill(flags.prefill),
        prefix_caching=False,
        watermark=0.01,
    )
    headroom = flags.headroom_blocks
    if headroom is None:
        headroom = max(0, flags.kv_blocks - parameters.HIGH_PRIORITY_LOAD_TOKENS // flags.block_size)
    return ClusterSettings(
        flags.instances,
        engine,
        load_profile(flags.profile),
        POLICIES[flags.policy],
        headroom_blocks={1: headroom},
        report_interval_s=flags.report_interval_ms / 1000,
    )


def bar(share: float, width: int = 30) -> str:
    filled = round(share * width)
    return f"[{'#' * filled}{'.' * (width - filled)}] {share:4.0%}"


def table(result: Result) -> str:
    figures = result.figures
    lines = ["".join([" " * 20, *(share.rjust(10) for share in SHARES)])]
    for title, name, unit in ROWS:
        factor = 1000 if unit == "s_per_token" else 1
        lines.append(title.ljust(20) + "".join(_cell(figures[f"{name}_{one}_{unit}"], factor) for one in SHARES))
    lines.append("")
    lines += [f"{name.ljust(26)} {_cell(figures[name])}" for name in MORE]
    return "\n".join(lines)


def _cell(value: float | None, factor: float = 1) -> str:
    return ("-" if value is None else f"{value * factor:,.4g}").rjust(10)


def draw(path: Path, records: Sequence[Record], title: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise WorkloadError("--plot needs matplotlib: pip install 'kvferry[bench]'.") from None
    waits = sorted(one.first_token_at - one.request.arrived_at for one in records if one.first_token_at is not None)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(waits, [(index + 1) / len(waits) for index in range(len(waits))])
    axes.set(xscale="log", xlabel="s to the first token", ylabel="share of requests", title=title)
    figure.savefig(path)
