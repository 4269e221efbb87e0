"""Engines and the gateway's policy in virtual time."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.members import Instance, Members
from gateway.policy.decide import PolicySettings
from gateway.policy.migration import MigrationSettings
from gateway.policy.picking import PickRules
from gateway.policy.policies import POLICIES, NamedPolicy
from gateway.policy.usage import RequestUsage, virtual_usage_blocks
from loadtest.sim.cluster import Cluster, ClusterSettings
from loadtest.sim.engine import Engine, EngineSettings, Prefill, Request
from loadtest.sim.node import Record
from loadtest.sim.profile import FAST, LLAMA_7B_A10
from loadtest.sim.reports import Identity, make_report, make_view, view_of
from loadtest.sim.tokens import SyntheticPrompt

ENGINE = EngineSettings(blocks_total=60, batch_max=16, step_tokens_max=256, sequence_tokens_max=400)
PAPER = dataclasses.replace(ENGINE, prefill=Prefill.WHOLE_PROMPT, prefix_caching=False, step_tokens_max=400)
EAGER = MigrationSettings(low_freeness_steps=60, high_freeness_steps=120)


def eager(name: str) -> NamedPolicy:
    """Moves at once and often, so that a few requests are enough to see it."""
    named = POLICIES[name]
    leader = PolicySettings(named.leader.policy, EAGER)
    picking = PickRules(cool_down_s=0.1, moves_max=named.picking.moves_max)
    return dataclasses.replace(named, leader=leader, picking=picking)


def settings(**changes: Any) -> ClusterSettings:
    values: dict[str, Any] = {"instances": 3, "engine": ENGINE, "profile": FAST.faster(0.1), "policy": eager("llumnix")}
    return ClusterSettings(**(values | changes))


def workload(seed: int, count: int = 60, rate: float = 40.0) -> list[Request]:
    dice = random.Random(seed)
    now = 0.0
    requests = []
    for index in range(count):
        now += dice.expovariate(rate)
        prompt, output = 1 + min(int(dice.expovariate(1 / 60)), 199), 1 + min(int(dice.expovariate(1 / 60)), 199)
        level = dice.choice([0, 0, 0, 1])
        request = Request(
            f"r{index}",
            SyntheticPrompt(index, prompt),
            output,
            arrived_at=now,
            priority=-level,
            execution_priority=level,
        )
        requests.append(request)
    return requests


def told(records: list[Record]) -> str:
    """All that became of them, as bytes to compare."""
    return json.dumps([{**dataclasses.asdict(record), "request": record.request.request_id} for record in records])


@given(
    st.integers(0, 1_000_000),
    st.sampled_from([ENGINE, PAPER]),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_request_ends_every_instance_is_empty_and_a_run_repeats(
    seed: int, engine: EngineSettings, policy: str, at_once: int, crashes: bool
) -> None:
    def play(looks_ahead: bool) -> str:
        cluster = Cluster(
            settings(
                engine=engine,
                policy=dataclasses.replace(eager(policy), moves_at_once=at_once),
                looks_ahead=looks_ahead,
                copies_tail=engine is PAPER,
            )
        )

        def crash() -> None:
            for request in cluster.crash("i0001"):
                cluster.restart(request)

        if crashes:
            cluster.at(0.7, crash)
        records = cluster.run(workload(seed, count=40))
        assert len(records) == 40
        for record in records:
            assert record.request.output_tokens == record.request.output_tokens_max
            assert record.first_token_at is not None
            assert record.finished_at is not None
            assert record.request.arrived_at < record.first_token_at <= record.finished_at
        cluster.check_empty()
        return told(records)

    assert play(True) == play(True) == play(False)


def test_requests_move_away_from_a_full_instance_and_none_does_without_a_policy() -> None:
    moved, stayed = Cluster(settings()), Cluster(settings(policy=POLICIES["infaas++"]))
    for cluster in (moved, stayed):
        cluster.run(workload(1, count=150))
    assert moved.moves_done > 0
    assert sum(record.moves for record in moved.records.values()) == moved.moves_done
    assert stayed.moves_begun == 0


def test_a_draining_instance_gets_nothing_new_and_what_it_has_moves_away() -> None:
    cluster = Cluster(settings(policy=dataclasses.replace(eager("llumnix"), moves_at_once=4)))
    seen: list[int] = []

    def look() -> None:
        seen.append(len(cluster.nodes["i0000"].engine.requests()))
        cluster.after(0.5, look)

    cluster.at(0.5, lambda: cluster.drain("i0000"))
    cluster.at(0.5, look)
    records = cluster.run(workload(2, count=150, rate=30))
    late = [record for record in records if record.dispatched_at is not None and record.dispatched_at > 0.7]
    assert late
    assert all(record.instance_id != "i0000" for record in late)
    assert seen[0] > 0
    assert seen[-1] == 0


def test_the_views_are_as_old_as_the_reports() -> None:
    """Between two reports a gateway knows of its own dispatches only."""
    cluster = Cluster(settings(instances=2, report_interval_s=10.0))
    records = cluster.run(
        [Request(f"q{index}", SyntheticPrompt(index, 30), 5, arrived_at=6.0 + index / 100) for index in range(6)]
    )
    chosen = [record.instance_id for record in records]
    assert chosen == ["i0000", "i0001"] * 3


def test_a_view_shows_the_engine_as_it_was_when_the_report_was_made_whenever_somebody_looks() -> None:
    cluster = Cluster(settings(instances=1, report_delay_s=0.02))
    node = cluster.nodes["i0000"]
    seen: list[int | None] = []

    def look() -> None:
        seen.append(node.view.requests_waiting if node.view is not None else None)

    for name, at_s in (("a", 0.05), ("b", 0.11)):
        request = Request(name, SyntheticPrompt(1, 8), 300, arrived_at=at_s)
        cluster.at(at_s, lambda request=request: node.engine.add(request))  # type: ignore[misc]
    for at_s in (0.01, 0.08, 0.115, 0.15, 0.25):  # Reports are made at 0, 0.1 and 0.2.
        cluster.at(at_s, look)
    cluster.run([Request("last", SyntheticPrompt(1, 8), 1, arrived_at=0.4)], until_s=0.3)
    assert seen == [None, 0, 0, 1, 2]


def test_a_classs_requests_count_together_as_they_do_one_by_one() -> None:
    engine = Engine(ENGINE, LLAMA_7B_A10)
    for index, priority in enumerate([0, 1, 1, 2, 0, 0, 0]):
        engine.add(Request(f"r{index}", SyntheticPrompt(index, 140), 9, execution_priority=priority))
    engine.step(0.0)
    headroom = {0: 0, 1: 20, 2: 7}
    seen = make_view(engine, Identity("i", "b", ("m",)), headroom_blocks=headroom)
    each = [RequestUsage(len(one.blocks), 0, False, False, one.execution_priority) for one in engine.running()]
    each += [
        RequestUsage(0, engine.demand_blocks(one), True, index == 0, one.execution_priority)
        for index, one in enumerate(engine.waiting())
    ]
    assert engine.waiting()
    assert len({one.execution_priority for one in engine.running()}) == 2
    assert seen.virtual_usage_blocks == virtual_usage_blocks(each, headroom)


@pytest.mark.parametrize("draining", [False, True])
def test_a_view_made_at_once_a_views_report_and_the_gateways_view_are_the_same(draining: bool) -> None:
    engine = Engine(ENGINE, LLAMA_7B_A10)
    for index in range(6):
        engine.add(Request(f"r{index}", SyntheticPrompt(index, 200), 9))
    engine.step(0.0)
    engine.reserve("m", Request("x", SyntheticPrompt(9, 30), 9), 1)
    identity = Identity("i", "b", ("m",), "kv")
    report = make_report(engine, identity, 1, draining=draining)
    members = Members(report_stale_s=5.0)
    card = {"id": "m", "root": "m", "parent": None}
    members.probed(Instance("i", "http://i", "b"), [card], True, None, 1.0)
    members.reported(report, 1.0)
    (seen,) = members.view(1.0).instances
    assert seen.requests_waiting > 0
    assert view_of(report) == seen
    assert make_view(engine, identity, draining=draining) == seen


def test_a_draining_engine_reports_no_freeness_and_its_view_is_minus_infinity() -> None:
    report = make_report(Engine(ENGINE, FAST), Identity("i", "b", ("m",)), 1, draining=True)
    assert (report.virtual_usage_blocks, report.freeness_steps) == (None, None)
    assert view_of(report).freeness_steps == -float("inf")
