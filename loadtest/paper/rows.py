"""Runs of the simulator as rows: what was run, and every figure of it with its unit in its name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.policy.autoscale import ScaleSettings
from loadtest.paper import parameters, stalls, workloads
from loadtest.paper.variants import VARIANTS
from loadtest.sim.metrics import by_class, percentile
from loadtest.sim.run import simulate

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One run. Policies that are compared get the same lengths, classes and pattern of arrivals from a seed."""

    figure: str
    trace: str
    load: str
    """A name of ``parameters.LOADS``, or empty where the rate is the figure's own."""
    rate: float
    cv: float
    policy: str
    seed: int
    requests: int = parameters.REQUESTS
    high_priority_share: float = 0.0
    scale_low_steps: float = 0.0
    """Auto-scaling: the band's lower end, 0 for none."""
    report_interval_s: float = 0.1
    highest_priority_share: float = 0.0
    """Of a third class, above the high one."""
    instances: int = parameters.INSTANCES
    variant: str = ""
    """A name of ``variants.VARIANTS``."""

    @property
    def key(self) -> tuple[Any, ...]:
        return dataclasses.astuple(self)


def run(job: Job) -> Row:
    measured = stalls.run(job.policy, job.instances, job.rate, job.seed) if job.figure == "16" else simulated(job)
    return dataclasses.asdict(job) | {name: _rounded(value) for name, value in measured.items()}


def simulated(job: Job) -> dict[str, Any]:
    variant = VARIANTS[job.variant]
    settings = parameters.cluster_for(parameters.policy_for(job.policy, job.trace), job.instances)
    settings = dataclasses.replace(settings, report_interval_s=job.report_interval_s)
    if job.high_priority_share:
        blocks = parameters.HEADROOM_BLOCKS
        if job.highest_priority_share:
            blocks = {**blocks, 2: blocks[1]}
        settings = dataclasses.replace(settings, headroom_blocks=blocks)
    if job.scale_low_steps:
        scale = ScaleSettings(low_steps=job.scale_low_steps, high_steps=job.scale_low_steps + 800.0)
        settings = dataclasses.replace(settings, instances=parameters.INSTANCES_AT_FIRST, scale=scale)
    arrivals = workloads.arrivals(
        job.trace,
        rate_rps=job.rate,
        count=job.requests,
        seed=job.seed,
        cv=job.cv,
        high_priority_share=job.high_priority_share,
        highest_priority_share=job.highest_priority_share,
    )
    ends_s = arrivals[-1].at_s
    result = simulate(variant.settings(settings), arrivals, prepare=lambda cluster: variant.put_into(cluster, ends_s))
    figures = dict(result.figures)
    if job.high_priority_share:
        figures |= by_class(result.records)
    if job.figure == "12":
        figures |= over_time(result.fragmented_shares)
    return figures


SPAN_S = 10


def over_time(shares: Sequence[float]) -> dict[str, Any]:
    """Means of ten seconds, while requests come and until all have ended."""
    spans = [shares[begin : begin + SPAN_S] for begin in range(0, len(shares), SPAN_S)]
    return {
        "fragmentation_p99_share": percentile(sorted(shares), 0.99),
        "fragmentation_by_10_s_share": [_rounded(sum(span) / len(span)) for span in spans],
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(field.name, field.default) for field in dataclasses.fields(Job))


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def write_rows(path: Path, rows: Iterable[Row], about: dict[str, Any]) -> None:
    """One row a line, in an order that does not depend on who was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in sorted(rows, key=lambda row: [str(part) for part in key_of(row)]))
    heads = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in about.items())
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{\n{heads} "rows": [\n  {lines}\n ]\n}}\n')
    partial.replace(path)


def run_all(
    jobs: Sequence[Job], processes: int, done: Callable[[Row], None], stops: Callable[[], bool] = lambda: False
) -> None:
    """In this process if one is enough, which is easier to interrupt and to profile. ``stops``: begin no more."""
    if processes == 1:
        for job in jobs:
            if stops():
                return
            done(run(job))
        return
    with ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        for future in as_completed(futures):
            if future.cancelled():
                continue
            done(future.result())
            if stops():
                for one in futures:
                    one.cancel()
