"""Properties of whole simulations, whatever comes and whatever goes wrong. A failing example is printed and repeats."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.autoscale import ScaleSettings
from gateway.policy.policies import POLICIES
from gateway.policy.waiting import WaitingRules
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.faults import Crash, Fault, SlowLinks, UnreliableReports
from loadtest.sim.run import requests_of, simulate
from loadtest.workloads.workload import Arrival
from tests.loadtest.sim.test_cluster import ENGINE, PAPER, eager
from tests.loadtest.sim.test_run import SLOW, arrivals, cluster_settings

FAULTS_END_S = 4.0
TIMES = st.floats(0.0, FAULTS_END_S)
SHARES = st.floats(0.0, 1.0)
FAULTS = st.lists(
    st.one_of(
        st.builds(
            UnreliableReports,
            lost_share=SHARES,
            late_share=SHARES,
            doubled_share=SHARES,
            late_s=st.floats(0.0, 1.0),
            ends_s=st.just(FAULTS_END_S),
            seed=st.integers(0, 99),
        ),
        st.builds(Crash, TIMES, st.one_of(st.none(), st.floats(0.1, 1.0))),
        st.builds(SlowLinks, st.floats(1.0, 100.0), TIMES, st.just(FAULTS_END_S)),
    ),
    max_size=3,
    unique_by=type,
)
WORKLOADS = st.builds(
    arrivals,
    seed=st.integers(0, 1_000_000),
    count=st.integers(1, 80),
    rate_rps=st.floats(5.0, 60.0),
    high_share=st.floats(0.0, 1.0),
)


class Watch:
    """Looks on while a cluster runs: what must hold at every moment."""

    def __init__(self, cluster: Cluster, drains_at: float) -> None:
        self.cluster = cluster
        self.drained_at: dict[str, float] = {}
        cluster.at(drains_at, self.drain)
        cluster.at(0.0, self.look)

    def drain(self) -> None:
        alive = [node for node in self.cluster.nodes.values() if node.alive and not node.draining]
        if len(alive) > 1:
            self.cluster.drain(alive[0].instance_id)

    def look(self) -> None:
        cluster, limits = self.cluster, self.cluster.settings
        for node in cluster.nodes.values():
            node.engine.check()
            load, moves_in = node.engine.load(), node.moves_in
            assert 0 <= load.blocks_free <= limits.engine.blocks_total
            assert len(node.moves_out) <= limits.policy.moves_at_once
            assert 0 <= moves_in <= limits.migrations_in_max
            assert node.engine.transfers <= moves_in + len(node.moves_out)
            if node.draining:
                self.drained_at.setdefault(node.instance_id, cluster.now)
            else:
                self.drained_at.pop(node.instance_id, None)
        cluster.after(0.1, self.look)

    def sent_to_draining(self, told_s: float) -> list[str]:
        """Requests whose last start was at an instance that had said long before that it drains."""
        return [
            one.request.request_id
            for one in self.cluster.records.values()
            if one.moves == 0
            and one.instance_id in self.drained_at
            and (one.dispatched_at or 0.0) > self.drained_at[one.instance_id] + told_s
        ]


def told_s(faults: list[Fault], interval_s: float) -> float:
    """When a gateway has a report for sure: one that is lost or late comes once nothing is lost any more."""
    unreliable = any(isinstance(one, UnreliableReports) for one in faults)
    return (FAULTS_END_S + 1.0 if unreliable else 0.0) + 2 * interval_s + 0.3


@settings(max_examples=25)
@given(
    WORKLOADS,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([PAPER, dataclasses.replace(ENGINE, prefix_caching=False)]),
    FAULTS,
    TIMES,
    st.sampled_from([0.1, 0.5]),
    st.booleans(),
)
def test_nothing_is_lost_or_starved_everything_is_within_bounds_and_a_run_repeats(
    line: list[Arrival],
    policy: str,
    engine: Any,
    faults: list[Fault],
    drains_at: float,
    interval_s: float,
    scales: bool,
) -> None:
    scale = ScaleSettings(low_steps=30, high_steps=200, sustained_s=0.5, instances_min=1, instances_max=5)

    def play() -> str:
        watches: list[Watch] = []

        def prepare(cluster: Cluster) -> None:
            watches.append(Watch(cluster, drains_at))
            for fault in faults:
                dataclasses.replace(fault).put_into(cluster)

        result = simulate(
            cluster_settings(
                policy,
                engine=engine,
                headroom_blocks={1: 20},
                report_interval_s=interval_s,
                scale=scale if scales else None,
                cold_start_s=0.5,
                control_delay_s=0.1,  # So that something is always under way when anything happens.
            ),
            line,
            prepare=prepare,
            until_s=60.0,
        )
        assert len(result.records) == len(line)
        for record in result.records:
            assert record.finished_at is not None, record
            assert record.request.output_tokens == record.request.output_tokens_max
        if not scales:
            assert watches[0].sent_to_draining(told_s(faults, interval_s)) == []
        return json.dumps(result.figures)

    assert play() == play()


@pytest.mark.parametrize("policy", ["infaas++", "llumnix", "late-binding", "kvferry"])
def test_everybody_gets_a_turn_however_many_come_after_them(policy: str) -> None:
    """More requests than can be served: who came first is served long before the last has come."""
    line = arrivals(5, 700, rate_rps=50.0, high_share=0.0)
    named = dataclasses.replace(eager(policy), waiting=WaitingRules(aged_s=5.0))
    result = simulate(ClusterSettings(3, PAPER, SLOW, named, copies_tail=True), line)
    firsts = [one for one in result.records if one.request.arrived_at < 3.0]
    waits = [one.first_token_at - one.request.arrived_at for one in firsts if one.first_token_at is not None]
    assert len(waits) == len(firsts)
    assert result.figures["duration_s"] > 2 * line[-1].at_s
    assert max(waits) < line[-1].at_s / 2


def test_reports_that_are_lost_or_late_are_told_from_those_that_come() -> None:
    """The newest counts, whenever it comes; and a run in which reports are lost is not one in which they come."""

    def seen(**changes: Any) -> list[float]:
        cluster = Cluster(cluster_settings("infaas++", instances=1))
        UnreliableReports(**changes).put_into(cluster)
        times: list[float] = []

        def look() -> None:
            node = cluster.nodes["i0000"]
            times.append(-1.0 if node.view is None or node._report is None else node._report.made_at)
            cluster.after(0.1, look)

        cluster.at(0.05, look)
        cluster._unfinished = 1
        cluster.run([], until_s=3.0)
        return times

    usual, lost = seen(), seen(lost_share=0.5)
    assert usual == pytest.approx([index / 10 for index in range(len(usual))])
    assert len(set(lost)) < 0.8 * len(usual)
    late = seen(late_share=0.5, late_s=0.35, doubled_share=0.5)
    assert late == sorted(late)
    assert any(then < now - 0.05 for then, now in zip(late, usual, strict=True))
    assert set(seen(lost_share=1.0)) == {-1.0}


def test_a_crashed_instances_requests_go_on_elsewhere_with_the_tokens_that_they_have() -> None:
    line, faults = arrivals(3, 60), [Crash(1.0, 0.5)]
    found: list[Cluster] = []

    def prepare(cluster: Cluster) -> None:
        found.append(cluster)
        faults[0].put_into(cluster)

    result = simulate(cluster_settings("kvferry"), line, prepare=prepare)
    assert [node.alive for node in found[0].nodes.values()].count(False) == 1
    assert len(found[0].nodes) == 4
    assert all(one.finished_at is not None for one in result.records)


def test_slow_links_are_slow_until_they_are_not() -> None:
    line = arrivals(2, 120)

    def moves(fault: SlowLinks | None) -> int:
        cluster = Cluster(cluster_settings("llumnix"))
        if fault is not None:
            fault.put_into(cluster)
        cluster.run(requests_of(line))
        return cluster.moves_done

    assert moves(SlowLinks(1e9)) < moves(SlowLinks(1e9, 0.0, 1.0)) <= moves(None)
