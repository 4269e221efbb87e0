"""Dispatch and pairing."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from gateway.policy.decide import Memory, Pair, Policy, PolicySettings, Unpair, decide
from gateway.policy.dispatch import Sent, choose_instance, dispatch_freeness
from gateway.policy.migration import MigrationSettings, pair_instances
from gateway.policy.view import ClusterView, InstanceView, ModelGroup, unknown_load

SETTINGS = PolicySettings(migration=MigrationSettings(low_freeness_steps=100, high_freeness_steps=500))


def instance(instance_id: str, freeness: float = 1000.0, **changes: Any) -> InstanceView:
    values = InstanceView(
        instance_id=instance_id,
        groups=frozenset({ModelGroup("m")}),
        healthy=True,
        stale=False,
        draining=False,
        kv_format="f",
        block_size=16,
        blocks_total=1000,
        virtual_usage_blocks=1000 - freeness / 16,
        head_of_line_blocks=0,
        queued_blocks=0,
        requests_running=1,
        requests_waiting=0,
        freeness_steps=freeness,
    )
    return dataclasses.replace(values, **changes)


def view(*instances: InstanceView) -> ClusterView:
    return ClusterView(instances)


def pairs(*instances: InstanceView, current: dict[str, str] | None = None) -> dict[str, str]:
    return pair_instances(view(*instances), current or {}, SETTINGS.migration)


def test_a_request_starts_at_the_freest_and_ties_go_by_id() -> None:
    assert choose_instance(view(instance("a", 10), instance("b", 20)), "m", {}) == "b"
    assert choose_instance(view(instance("b"), instance("a")), "m", {}) == "a"


def test_what_was_sent_since_the_report_counts() -> None:
    sent = {"b": Sent(requests=3, tokens=160)}
    assert choose_instance(view(instance("a", 500), instance("b", 900)), "m", sent) == "a"


def test_dispatch_counts_the_whole_queue_where_migration_counts_its_head() -> None:
    busy = instance("a", 1000, queued_blocks=50, head_of_line_blocks=10)
    assert dispatch_freeness(busy, Sent()) == 1000 - 40 * 16


def test_what_cannot_take_a_request_is_passed_over() -> None:
    for change in (
        {"draining": True},
        {"stale": True},
        {"healthy": False},
        {"groups": frozenset({ModelGroup("other")})},
    ):
        assert choose_instance(view(instance("a", **change), instance("b", -5000)), "m", {}) == "b"
        assert choose_instance(view(instance("a", **change)), "m", {}) is None
    assert choose_instance(view(instance("a"), instance("b", 1)), "m", {}, exclude={"a"}) == "b"
    assert choose_instance(view(unknown_load("a", frozenset({ModelGroup("m")}), healthy=True)), "m", {}) is None


def test_the_fullest_is_paired_with_the_freest() -> None:
    assert pairs(instance("a", 50), instance("b", 20), instance("c", 600), instance("d", 900)) == {"b": "d", "a": "c"}
    assert pairs(instance("a", 150), instance("b", 900)) == {}
    assert pairs(instance("a", 50), instance("b", 400)) == {}


def test_the_same_kv_format_comes_before_freeness() -> None:
    source = instance("a", 50)
    assert pairs(source, instance("b", 900, kv_format="g"), instance("c", 600)) == {"a": "c"}
    assert pairs(source, instance("b", 900, kv_format=None)) == {"a": "b"}


def test_a_draining_instance_is_a_source_while_something_runs_there() -> None:
    draining = instance("a", -math.inf, draining=True)
    assert pairs(draining, instance("b", 900)) == {"a": "b"}
    assert pairs(dataclasses.replace(draining, requests_running=0), instance("b", 900)) == {}


def test_a_pair_that_still_holds_is_kept() -> None:
    instances = instance("a", 50), instance("b", 600), instance("c", 900)
    assert pairs(*instances, current={"a": "b"}) == {"a": "b"}
    assert pairs(instances[0], instance("b", 400), instances[2], current={"a": "b"}) == {"a": "c"}


def test_a_destination_serves_what_the_source_serves() -> None:
    assert pairs(instance("a", 50), instance("b", 900, groups=frozenset({ModelGroup("other")}))) == {}


def test_a_source_that_is_above_the_threshold_again_is_unpaired() -> None:
    full = view(instance("a", 50), instance("b", 900))
    actions, memory = decide(full, Memory(), 0.0, SETTINGS)
    assert actions == [Pair("a", "b")]
    assert decide(full, memory, 1.0, SETTINGS)[0] == [Pair("a", "b")]
    actions, memory = decide(view(instance("a", 200), instance("b", 700)), memory, 2.0, SETTINGS)
    assert (actions, memory.pairs) == ([Unpair("a")], {})
    assert decide(view(instance("a", 200)), memory, 3.0, SETTINGS)[0] == []


def test_pairs_are_disjoint_and_do_not_depend_on_the_order() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        count = rng.randint(0, 8)
        instances = [
            instance(str(index), rng.uniform(-500, 2000), stale=rng.random() < 0.2, kv_format=rng.choice("fg"))
            for index in range(count)
        ]
        found = pairs(*instances)
        assert len({*found, *found.values()}) == 2 * len(found), f"seed {seed}"
        assert all(int(one) < count for one in found)
        rng.shuffle(instances)
        assert pairs(*instances) == found, f"seed {seed}"


def test_the_policy_none_pairs_nothing_and_ends_what_was_paired() -> None:
    cluster = view(instance("a", 10), instance("b", 900))
    actions, memory = decide(cluster, Memory(), 0.0, SETTINGS)
    assert actions == [Pair("a", "b")]
    actions, memory = decide(cluster, memory, 1.0, dataclasses.replace(SETTINGS, policy=Policy.NONE))
    assert actions == [Unpair("a")]
    assert memory == Memory()


def test_a_request_that_has_begun_goes_on_only_where_its_model_is_the_same() -> None:
    one, other = ModelGroup("m", "root-1"), ModelGroup("m", "root-2")
    cluster = view(instance("a", 50, groups=frozenset({other})), instance("b", 10, groups=frozenset({one})))
    assert choose_instance(cluster, "m", {}) == "a"
    assert choose_instance(cluster, "m", {}, group=one) == "b"
    assert choose_instance(cluster, None, {}, group=one) == "b"
    assert choose_instance(cluster, "m", {}, exclude={"b"}, group=one) is None
    assert pairs(instance("a", 50, groups=frozenset({one})), instance("b", 900, groups=frozenset({other}))) == {}


def test_an_adapter_is_asked_only_of_those_that_have_it_and_holds_up_no_pair() -> None:
    base, adapter = ModelGroup("m"), ModelGroup("lora1", "/lora1", "m")
    with_adapter = instance("b", 50, groups=frozenset({base, adapter}))
    assert choose_instance(view(instance("a", groups=frozenset({base})), with_adapter), "lora1", {}) == "b"
    assert pairs(with_adapter, instance("c", 900, groups=frozenset({base}))) == {"b": "c"}
    assert pairs(with_adapter, instance("c", 900, groups=frozenset({adapter}))) == {}
