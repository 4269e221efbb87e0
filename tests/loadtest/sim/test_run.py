"""Whole experiments: what they come to, and that nothing is lost, starved or left over, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.autoscale import ScaleSettings
from gateway.policy.policies import POLICIES
from gateway.policy.waiting import WaitingRules
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.engine import Request
from loadtest.sim.metrics import by_class, percentile, spread, summary
from loadtest.sim.node import Record
from loadtest.sim.profile import FAST
from loadtest.sim.run import fragmented_share, requests_of, simulate
from loadtest.sim.tokens import SyntheticPrompt
from loadtest.workloads.workload import Arrival
from tests.loadtest.sim.test_cluster import PAPER, eager

SLOW = FAST.faster(0.1)


def arrivals(seed: int, count: int, rate_rps: float = 40.0, high_share: float = 0.2) -> list[Arrival]:
    dice = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += dice.expovariate(rate_rps)
        lengths = [1 + min(int(dice.expovariate(1 / 60)), 199) for _ in range(2)]
        found.append(Arrival(at_s, lengths[0], lengths[1], int(dice.random() < high_share)))
    return found


def cluster_settings(policy: str, **changes: Any) -> ClusterSettings:
    named = dataclasses.replace(eager(policy), waiting=WaitingRules(aged_s=1.0))
    values: dict[str, Any] = {"instances": 3, "engine": PAPER, "profile": SLOW, "policy": named, "copies_tail": True}
    return ClusterSettings(**(values | changes))


class Trouble:
    """A drain, a crash and a new instance at given times; and, every half second, whether all is within bounds."""

    def __init__(self, cluster: Cluster, drains_s: float, crashes_s: float, adds_s: float) -> None:
        self.cluster = cluster
        self.drained_at: float | None = None
        self.late: list[str] = []
        cluster.at(drains_s, self.drain)
        cluster.at(crashes_s, self.crash)
        cluster.at(adds_s, lambda: cluster.add_instance(offset_s=0.3))
        cluster.at(0.25, self.look)

    def drain(self) -> None:
        self.cluster.drain("i0000")
        self.drained_at = self.cluster.now

    def crash(self) -> None:
        for request in self.cluster.crash("i0001"):
            self.cluster.restart(request)

    def look(self) -> None:
        for node in self.cluster.nodes.values():
            node.engine.check()
            assert len(node.moves_out) <= self.cluster.settings.policy.moves_at_once
            assert node.moves_in <= self.cluster.settings.migrations_in_max
        told_s = 2 * self.cluster.settings.report_interval_s
        if self.drained_at is not None:
            self.late += [
                one.request.request_id
                for one in self.cluster.records.values()
                if one.instance_id == "i0000" and (one.dispatched_at or 0.0) > self.drained_at + told_s
            ]
        self.cluster.after(0.5, self.look)


@settings(max_examples=12)
@given(
    st.integers(0, 1_000_000),
    st.sampled_from(sorted(POLICIES)),
    st.floats(0.1, 2.0),
    st.floats(0.1, 2.0),
    st.floats(0.1, 2.0),
)
def test_whatever_happens_every_request_ends_and_the_same_seed_gives_the_same_bytes(
    seed: int, policy: str, drains_s: float, crashes_s: float, adds_s: float
) -> None:
    def play() -> str:
        trouble: list[Trouble] = []
        result = simulate(
            cluster_settings(policy, headroom_blocks={1: 40}),
            arrivals(seed, 60),
            prepare=lambda cluster: trouble.append(Trouble(cluster, drains_s, crashes_s, adds_s)),
            until_s=600.0,
        )
        assert all(one.finished_at is not None for one in result.records)
        assert len(result.records) == 60
        assert trouble[0].late == []
        return json.dumps(result.figures)

    assert play() == play()


def test_the_largest_prompt_is_not_starved_by_a_stream_of_small_ones() -> None:
    """First fit alone would let them pass for ever."""
    small = [Arrival(index / 30, 40, 40) for index in range(900)]
    line = sorted([*small, Arrival(1.0, 390, 5)], key=lambda one: one.at_s)
    waits = []
    for policy in ("kvferry", "late-binding"):
        result = simulate(cluster_settings(policy, instances=2), line)
        largest = max(result.records, key=lambda one: one.request.prompt_tokens)
        assert largest.first_token_at is not None
        waits.append(largest.first_token_at - largest.request.arrived_at)
    assert max(waits) < 10
    never = dataclasses.replace(eager("late-binding"), waiting=WaitingRules(aged_s=1e9))
    starved = simulate(dataclasses.replace(cluster_settings("late-binding", instances=2), policy=never), line)
    largest = max(starved.records, key=lambda one: one.request.prompt_tokens)
    assert largest.first_token_at is not None
    assert largest.first_token_at - largest.request.arrived_at > 2 * max(waits)


@pytest.mark.parametrize("policy", ["infaas++", "kvferry"])
def test_instances_come_with_the_load_and_go_with_it(policy: str) -> None:
    scale = ScaleSettings(low_steps=60, high_steps=200, sustained_s=1.0, instances_max=6)
    seen: list[int] = []

    def prepare(cluster: Cluster) -> None:
        def look() -> None:
            seen.append(sum(node.alive for node in cluster.nodes.values()))
            cluster.after(1.0, look)

        cluster.at(0.0, look)

    burst = [*arrivals(1, 300, 60.0), *(Arrival(60.0 + index, 20, 20) for index in range(60))]
    result = simulate(cluster_settings(policy, instances=1, scale=scale, cold_start_s=2.0), burst, prepare=prepare)
    assert result.figures["requests_finished"] == len(burst)
    assert max(seen) > 2
    assert seen[-1] == 1
    assert result.figures["instances_mean"] == pytest.approx(sum(seen) / len(seen), rel=0.1)


def test_a_summary_counts_what_its_users_felt() -> None:
    records = []
    for index in range(40):
        request = Request(f"r{index:02d}", SyntheticPrompt(index, 10 + index), 11, arrived_at=1.0)
        request.output_tokens = 11
        record = Record(request, first_token_at=2.0 + index, finished_at=12.0 + index, priority=int(index % 4 == 0))
        records.append(record)
    records[0].moves, records[0].undone, records[0].preemption_loss_s = 4, 1, 20.0
    found = summary(records)
    assert found["prefill_mean_s"] == pytest.approx(20.5)
    assert (found["prefill_p50_s"], found["prefill_p99_s"], found["prefill_max_s"]) == (20.0, 40.0, 40.0)
    assert found["largest_prefill_mean_s"] == pytest.approx(39.5)
    assert found["decode_mean_s_per_token"] == pytest.approx(1.0)
    assert found["preemption_loss_mean_s"] == pytest.approx(0.5)
    assert (found["moves_per_request"], found["moved_over_3_share"], found["moves_undone_share"]) == (0.1, 0.025, 0.25)
    assert by_class(records)["high_prefill_mean_s"] == pytest.approx(19.0)
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert spread("x", "s", [])["x_p99_s"] is None
    assert summary([])["prefill_mean_s"] is None


def test_memory_is_fragmented_when_it_would_do_in_one_place() -> None:
    cluster = Cluster(cluster_settings("infaas++", instances=2))
    requests = requests_of([Arrival(0.0, 180, 30) for _ in range(12)])
    assert fragmented_share(cluster) == 0.0
    cluster.run(requests, until_s=1.0)
    shares = []
    while cluster.now < 1.5:
        cluster.run([], until_s=cluster.now + 0.1)
        shares.append(fragmented_share(cluster))
        cluster.now += 0.1
    free = sum(node.load().blocks_free for node in cluster.nodes.values()) / (2 * PAPER.blocks_total)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert shares[-1] <= free + 1e-9
