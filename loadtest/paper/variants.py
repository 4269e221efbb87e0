"""Runs that differ from a figure's usual cluster in one thing: a fault, a slower start, another headroom."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.paper import parameters
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.faults import Crash, Fault, SlowLinks, UnreliableReports

COLD_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Variant:
    """``faults``: those of a run whose last request arrives at that time, in seconds."""

    settings: Callable[[ClusterSettings], ClusterSettings] = lambda settings: settings
    faults: Callable[[float], tuple[Fault, ...]] = lambda ends_s: ()

    def put_into(self, cluster: Cluster, ends_s: float) -> None:
        for fault in self.faults(ends_s):
            fault.put_into(cluster)


def headroom(load_tokens: int) -> Variant:
    """An instance that runs a request of high priority is filled up to so many tokens."""
    blocks = parameters.BLOCKS - load_tokens // parameters.BLOCK_SIZE

    def change(settings: ClusterSettings) -> ClusterSettings:
        return dataclasses.replace(settings, headroom_blocks=dict.fromkeys(settings.headroom_blocks, blocks))

    return Variant(change)


def cold_start(seconds: float) -> Variant:
    return Variant(lambda settings: dataclasses.replace(settings, cold_start_s=seconds))


def threshold(steps: float) -> Variant:
    """Of migration: sources are below it, and destinations above."""

    def change(settings: ClusterSettings) -> ClusterSettings:
        policy = settings.policy
        migration = dataclasses.replace(policy.leader.migration, low_freeness_steps=steps, high_freeness_steps=steps)
        leader = dataclasses.replace(policy.leader, migration=migration)
        return dataclasses.replace(settings, policy=dataclasses.replace(policy, leader=leader))

    return Variant(change)


HEADROOMS_TOKENS = (400, 1_600, 3_200, 6_400)
THRESHOLDS_STEPS = (16, 48, 96, 160)
COLD_STARTS_S = (0.0, 60.0, 300.0)
FAULTS: Mapping[str, Variant] = {
    "one crash": Variant(faults=lambda ends_s: (Crash(ends_s / 3, COLD_START_S),)),
    "three crashes": Variant(faults=lambda ends_s: tuple(Crash(ends_s * part / 4, COLD_START_S) for part in (1, 2, 3))),
    "reports lost, 30 %": Variant(faults=lambda ends_s: (UnreliableReports(lost_share=0.3),)),
    "reports 500 ms late, 30 %": Variant(faults=lambda ends_s: (UnreliableReports(late_share=0.3),)),
    "reports doubled, 30 %": Variant(faults=lambda ends_s: (UnreliableReports(doubled_share=0.3),)),
    "links ten times slower": Variant(faults=lambda ends_s: (SlowLinks(10.0),)),
}
VARIANTS: Mapping[str, Variant] = {
    "": Variant(),
    **FAULTS,
    **{f"target load {tokens:,} tokens": headroom(tokens) for tokens in HEADROOMS_TOKENS},
    **{f"threshold {steps} steps": threshold(steps) for steps in THRESHOLDS_STEPS},
    **{f"cold start {seconds:g} s": cold_start(seconds) for seconds in COLD_STARTS_S},
}
