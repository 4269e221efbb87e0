"""The same trace in the simulator, with the measured profile, and the live gateway's settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gateway.policy.policies import POLICIES, NamedPolicy
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.profile import Profile
from loadtest.sim.run import requests_of
from loadtest.validation.live import Seen
from loadtest.validation.workload import ENGINE, INSTANCES
from loadtest.workloads.workload import Arrival

MIGRATION = POLICIES["kvferry"].leader.migration
LEADER_TICK_S = 0.5


def policy(moves: bool) -> NamedPolicy:
    """As the gateway and the plugin have it by default; without moves, late binding alone."""
    return POLICIES["kvferry" if moves else "late-binding"]


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
