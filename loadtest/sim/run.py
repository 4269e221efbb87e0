"""One experiment: a workload, a cluster and a policy in, a row of figures out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.policy.usage import freeness_steps
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.engine import Request
from loadtest.sim.metrics import mean, summary
from loadtest.sim.node import Record
from loadtest.sim.tokens import SyntheticPrompt
from loadtest.workloads.workload import Arrival

SAMPLE_S = 1.0
"""Between two looks at the whole cluster's memory."""
FREENESS_MAX_STEPS = 1000.0
"""An instance with next to nothing to do has a freeness of any size; it counts as this."""


@dataclass(frozen=True, slots=True)
class Result:
    records: list[Record]
    figures: dict[str, Any]
    fragmented_shares: list[float]
    """One a second."""


def requests_of(arrivals: Sequence[Arrival]) -> list[Request]:
    """vLLM's priority is the lower the sooner; the class is the other way round."""
    return [
        Request(
            f"r{index:06d}",
            SyntheticPrompt(index, arrival.prompt_tokens),
            arrival.output_tokens,
            arrived_at=arrival.at_s,
            priority=-arrival.priority,
            execution_priority=arrival.priority,
        )
        for index, arrival in enumerate(arrivals)
    ]


def simulate(
    settings: ClusterSettings,
    arrivals: Sequence[Arrival],
    *,
    tell: Callable[[float], None] | None = None,
    prepare: Callable[[Cluster], None] | None = None,
    until_s: float = float("inf"),
) -> Result:
    """``tell`` is called now and then with the share of requests that have arrived. ``prepare`` may put faults in."""
    cluster = Cluster(settings)
    fragmented: list[float] = []
    balance = Balance()
    requests = requests_of(arrivals)

    def look() -> None:
        fragmented.append(fragmented_share(cluster))
        balance.look(cluster)
        if tell is not None:
            tell(len(cluster.records) / len(requests))
        cluster.after(SAMPLE_S, look)

    cluster.at(0.0, look)
    if prepare is not None:
        prepare(cluster)
    records = cluster.run(requests, until_s)
    ends_s = cluster.now
    if all(one.finished_at is not None for one in records):
        cluster.check_empty()
    figures = summary(records) | {
        "fragmentation_mean_share": mean(fragmented),
        "duration_s": ends_s,
        "preemptions": cluster.preemptions,
        "busy_answers": cluster.busy_answers,
        "instance_hours": cluster.instance_s() / 3600,
        "instances_mean": cluster.instance_s() / ends_s if ends_s else 0.0,
    }
    return Result(records, figures | balance.figures(), fragmented)


@dataclass(slots=True)
class Balance:
    """How alike the instances are, and whether moves make any of them worse. A look a second."""

    spreads_steps: list[float] = field(default_factory=list)
    moving: int = 0
    negative: int = 0

    def look(self, cluster: Cluster) -> None:
        settings = cluster.settings.engine
        found = []
        for node in cluster.nodes.values():
            if not node.alive or node.draining:
                continue
            load = node.load()
            usage = settings.blocks_total - load.blocks_free + load.head_of_line_blocks
            found.append(freeness_steps(settings.blocks_total, usage, load.running, settings.block_size))
            if node.moves_out or node.moves_in:
                self.moving += 1
                self.negative += found[-1] < 0
        if len(found) > 1:
            self.spreads_steps.append(statistics.pstdev(min(one, FREENESS_MAX_STEPS) for one in found))

    def figures(self) -> dict[str, Any]:
        """``negative_while_moving_share``: of the looks at instances with a migration under way."""
        return {
            "freeness_spread_mean_steps": mean(self.spreads_steps),
            "negative_while_moving_share": self.negative / self.moving if self.moving else 0.0,
        }


def fragmented_share(cluster: Cluster) -> float:
    """The part of all memory that is free and would do for requests that are queued, had it been in one place.

    Of those that wait in instances the first one each (Llumnix, section 6.2); at the gateway as many as there are
    instances.
    """
    loads = [node.load() for node in cluster.nodes.values() if node.alive]
    settings = cluster.settings.engine
    free = left = sum(load.blocks_free for load in loads)
    demands = [load.head_of_line_blocks for load in loads if load.head_of_line_blocks]
    waiting = cluster.front.waiting()[: len(loads)]
    demands += [settings.blocks_for(request.total_tokens) for request in waiting]
    for demand in sorted(demands):
        if demand > left:
            break
        left -= demand
    return (free - left) / max(1, settings.blocks_total * len(loads))
