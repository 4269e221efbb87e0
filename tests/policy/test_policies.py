"""Where a request starts, what is moved, and what no move is worth."""

from __future__ import annotations

import dataclasses
import random

import pytest

from gateway.policy.decide import Memory, Pair, Policy, PolicySettings, decide
from gateway.policy.dispatch import Sent, choose_least_loaded, choose_next, choose_protecting
from gateway.policy.migration import MigrationSettings, pair_instances
from gateway.policy.picking import Movable, PickRules, pick
from gateway.policy.policies import POLICIES, Start
from gateway.policy.view import ClusterView
from gateway.policy.waiting import allot, best_site, kept_instance
from tests.policy.test_decide import instance, view
from tests.policy.test_waiting import RULES, place, waiter

GUARDED = MigrationSettings(low_freeness_steps=48, high_freeness_steps=48, guards_destination=True)


def test_the_lowest_class_moves_first_and_then_the_shortest() -> None:
    some = [Movable("a", 1, 10, True), Movable("b", 0, 30, True), Movable("c", 0, 20, True), Movable("d", 0, 5, False)]
    assert pick(some, PickRules()) == "c"
    assert pick(some, PickRules(), draining=True) == "d"
    assert pick([], PickRules()) is None


def test_a_request_that_has_just_moved_or_moved_often_stays() -> None:
    rules = PickRules(cool_down_s=5, moves_max=3)
    fresh, often = Movable("fresh", 0, 10, True, 1, 4.9), Movable("often", 0, 20, True, 3)
    assert pick([fresh, often], rules) is None
    assert pick([fresh, often, Movable("other", 0, 30, True, 2, 5.0)], rules) == "other"
    assert pick([fresh, often], rules, draining=True) == "often"


def test_no_request_moves_to_where_it_would_bring_the_next_shortage() -> None:
    full = instance("full", -10.0, requests_running=2, blocks_used=600, virtual_usage_blocks=1200)
    room = instance("room", 4000.0, requests_running=1, virtual_usage_blocks=750)
    small = dataclasses.replace(full, blocks_used=60)
    assert pair_instances(view(full, room), {}, GUARDED) == {}
    assert pair_instances(view(small, room), {}, GUARDED) == {"full": "room"}
    assert pair_instances(view(full, room), {}, dataclasses.replace(GUARDED, guards_destination=False))
    draining = dataclasses.replace(full, draining=True)
    assert pair_instances(view(draining, room), {}, GUARDED) == {"full": "room"}


def test_the_instance_that_is_kept_for_a_waiting_request_is_emptied_and_takes_nothing() -> None:
    instances = tuple(instance(one, freeness, blocks_used=5) for one, freeness in (("a", 600), ("b", 700), ("c", 10)))
    settings = PolicySettings(Policy.KVFERRY, MigrationSettings(low_freeness_steps=48, high_freeness_steps=48))
    actions, _ = decide(ClusterView(instances, frozenset({"b"})), Memory(), 0.0, settings)
    assert actions == [Pair("b", "a")]
    actions, _ = decide(ClusterView(instances), Memory(), 0.0, settings)
    assert actions == [Pair("c", "b")]
    paper = dataclasses.replace(settings, policy=Policy.LLUMNIX)
    assert decide(ClusterView(instances, frozenset({"b"})), Memory(), 0.0, paper)[0] == [Pair("c", "b")]


def test_the_kept_instance_is_the_one_that_allot_gives_to_nobody() -> None:
    dice = random.Random(1)
    kept = 0
    for _ in range(200):
        sites = [place(name, dice.randint(1, 30)) for name in "abc"]
        old = waiter("old", waited_s=dice.choice([20, 40]), blocks=dice.randint(10, 50))
        line = [old, *(waiter(f"w{index}", blocks=1) for index in range(90))]
        found = kept_instance(line, sites, RULES)
        taken = {one.instance_id for one in allot(line, sites, RULES)}
        kept += found is not None
        if found is not None:
            assert found not in taken
        elif old.waited_s >= RULES.aged_s:
            assert "old" in {one.request_id for one in allot(line, sites, RULES)}
    assert kept > 20


def test_the_least_loaded_counts_memory_and_what_waits_for_it() -> None:
    many = instance("many", 100, requests_running=60, virtual_usage_blocks=500)
    queue = instance("queue", 900, virtual_usage_blocks=450, head_of_line_blocks=40, queued_blocks=200)
    assert choose_least_loaded(view(many, queue), "m", {}) == "many"
    assert choose_least_loaded(view(many, queue), "m", {"many": Sent(1, 16 * 200)}) == "queue"
    assert choose_least_loaded(view(), "m", {}) is None


def test_in_turn_passes_over_those_that_cannot_be_used() -> None:
    cluster = view(instance("a"), instance("b", draining=True), instance("c"))
    assert [choose_next(cluster, "m", last) for last in (None, "a", "b", "c", "z")] == ["a", "c", "c", "a", "a"]
    assert choose_next(view(), "m", "a") is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_named_policy_says_where_a_request_starts_unless_it_waits(name: str) -> None:
    named = POLICIES[name]
    assert named.name == name
    cluster = view(instance("a", 900), instance("b", 100))
    if named.start is Start.WHEN_ROOM:
        with pytest.raises(ValueError, match="allotted"):
            named.start_at(cluster, "m", {})
    else:
        assert named.start_at(cluster, "m", {}) == "a"


def test_a_protected_request_joins_the_fullest_that_keeps_headroom_and_others_stay_away() -> None:
    sites = [
        place("none", 50),
        dataclasses.replace(place("some", 40, free=20), protects=True),
        dataclasses.replace(place("full", 40, free=10), protects=True),
    ]
    small, large = waiter("small", blocks=8), waiter("large", blocks=30)
    chosen = [best_site(dataclasses.replace(one, is_protected=True), sites) for one in (small, large)]
    assert [one.instance_id for one in chosen if one is not None] == ["full", "none"]
    normal = best_site(small, sites)
    assert normal is not None
    assert normal.instance_id == "none"


def test_at_once_as_well() -> None:
    protecting = instance("b", 100, virtual_usage_blocks=900, protects=True)
    cluster = view(instance("a", 900, virtual_usage_blocks=100), protecting)
    assert choose_protecting(cluster, "m", {}, 16 * 100) == "b"
    assert choose_protecting(cluster, "m", {}, 16 * 101) is None
    assert choose_protecting(cluster, "m", {"b": Sent(1, 16)}, 16 * 100) is None
    assert POLICIES["llumnix"].start_at(cluster, "m", {}, protected_tokens=16) == "b"
    assert POLICIES["llumnix"].start_at(cluster, "m", {}) == "a"


def test_more_load_never_makes_a_full_site_look_freer() -> None:
    few, many = place("few", 5, free=-10, batch=2), place("many", 5, free=-20, batch=40)
    assert few.freeness_steps > many.freeness_steps


def test_what_has_headroom_is_not_moved_for_its_own_headroom() -> None:
    protected = Movable("p", 0, 1, True, is_protected=True)
    assert pick([protected, Movable("n", 1, 9, True)], PickRules()) == "n"
    assert pick([protected], PickRules()) is None
    assert pick([protected], PickRules(), draining=True) == "p"
