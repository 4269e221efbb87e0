"""The same trace in the simulator, with the measured profile, and the live gateway's settings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from gateway.policy.decide import Policy, PolicySettings
from gateway.policy.migration import MigrationSettings
from gateway.policy.picking import PickRules
from gateway.policy.policies import POLICIES, STABLE_STEPS, NamedPolicy
from gateway.policy.waiting import GROWTH_TOKENS
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.profile import Profile
from loadtest.sim.run import requests_of
from loadtest.validation.live import Seen
from loadtest.validation.workload import ENGINE, INSTANCES
from loadtest.workloads.workload import Arrival

MIGRATION = MigrationSettings(low_freeness_steps=STABLE_STEPS, high_freeness_steps=STABLE_STEPS)
LEADER_TICK_S = 0.5
SETTLE_S = 1.0


def policy(moves: bool) -> NamedPolicy:
    """As the gateway and the plugin have it by default, and with the thresholds that the run gives it."""
    leader = PolicySettings(Policy.KVFERRY, MIGRATION) if moves else PolicySettings(Policy.NONE)
    picking = PickRules(cool_down_s=SETTLE_S)
    return dataclasses.replace(
        POLICIES["kvferry"], leader=leader, picking=picking, growth_tokens=GROWTH_TOKENS, moves_at_once=1
    )


def play(profile: Profile, arrivals: Sequence[Arrival], moves: bool) -> Seen:
    cluster = Cluster(
        ClusterSettings(
            INSTANCES, ENGINE, profile, policy(moves), tick_s=LEADER_TICK_S, looks_ahead=False, keeps_token_times=True
        )
    )
    seen = Seen()
    for record in cluster.run(requests_of(arrivals)):
        times = record.token_times
        seen.failed += len(times) != record.request.output_tokens_max
        seen.first_token_s.append(times[0] - record.request.arrived_at)
        seen.gaps_s += [after - before for before, after in itertools.pairwise(times)]
    seen.preemptions, seen.moves = cluster.preemptions, cluster.moves_done
    return seen
