"""Who of those that wait starts where: by class, by age, and by what fits."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.dispatch import Sent
from gateway.policy.waiting import Room, Site, Waiter, WaitingRules, allot, ordered, room, site
from gateway.wire import PriorityClass
from tests.policy.test_decide import instance

HIGH, NORMAL, LOW = sorted(PriorityClass)
RULES = WaitingRules(aged_s=30)
BLOCK = 16


def waiter(name: str, rank: int = NORMAL, waited_s: float = 1.0, blocks: int = 1, *exclude: str) -> Waiter:
    return Waiter(name, rank, waited_s, blocks * BLOCK, frozenset(exclude))


def place(name: str, blocks: int, places: int = 9, free: float | None = None, batch: int = 1) -> Site:
    return Site(name, Room(blocks, places), BLOCK, 100, blocks if free is None else free, batch)


def started(waiters: list[Waiter], *sites: Site, rules: WaitingRules = RULES) -> dict[str, str]:
    return {one.request_id: one.instance_id for one in allot(waiters, sites, rules)}


def test_an_urgent_class_comes_first_and_within_a_class_the_oldest() -> None:
    line = [waiter("n1", waited_s=9), waiter("l", LOW, 20), waiter("h1", HIGH, 1), waiter("h2", HIGH, 2)]
    assert [one.request_id for one in ordered(line, RULES)] == ["h2", "h1", "n1", "l"]
    assert started(line, place("a", 50, places=3)).keys() == {"h2", "h1", "n1"}


def test_the_oldest_of_any_class_comes_first_once_it_has_aged() -> None:
    line = [waiter("h", HIGH, 1), waiter("l1", LOW, 31), waiter("l2", LOW, 40)]
    assert [one.request_id for one in ordered(line, RULES)] == ["l2", "h", "l1"]


def test_who_does_not_fit_holds_up_nobody_behind_it() -> None:
    line = [waiter("large", waited_s=9, blocks=40), waiter("small", waited_s=1, blocks=4)]
    assert started(line, place("a", 10)) == {"small": "a"}


def test_however_many_fit_nowhere_they_hold_up_nobody_smaller() -> None:
    """Under overload hundreds of large ones gather at the front of the line."""
    line = [*(waiter(f"large{n}", waited_s=29 - n / 100, blocks=40 + n) for n in range(300)), waiter("small", blocks=4)]
    assert started(line, place("a", 10)) == {"small": "a"}
    elsewhere = waiter("nowhere", NORMAL, 29.0, 2, "a")
    assert started([elsewhere, waiter("small", blocks=4)], place("a", 10)) == {"small": "a"}, "it fits, but may not"


def test_an_instance_is_kept_for_an_aged_one_that_fits_nowhere() -> None:
    """The one that is nearest to it; what ends there makes it larger, so it stays the same one."""
    large = waiter("large", waited_s=31, blocks=40)
    small = [waiter(f"small{n}", blocks=4) for n in range(9)]
    assert started([large, *small], place("a", 10), place("b", 20)) == {"small0": "a", "small1": "a"}
    assert started([large, *small[:2]], place("a", 10), place("b", 40)) == {"large": "b", "small0": "a", "small1": "a"}
    young = waiter("large", waited_s=29, blocks=40)
    assert started([young, *small[:2]], place("a", 10), place("b", 20)) == {"small0": "b", "small1": "a"}


def test_each_goes_to_the_freest_that_fits_and_counts_there_for_the_next() -> None:
    line = [waiter("one", waited_s=3, blocks=8), waiter("two", waited_s=2, blocks=8), waiter("three", blocks=8)]
    sites = (place("a", 20, batch=4), place("b", 20, batch=3))
    assert started(line, *sites) == {"one": "b", "two": "a", "three": "b"}
    assert started([waiter("one", NORMAL, 1.0, 1, "b")], *sites) == {"one": "a"}, "b is not to be tried"


def test_a_newcomer_leaves_every_running_request_room_to_grow() -> None:
    assert room(20, 0, batch=7, batch_max=8, growth_tokens=8, block_size=16) == Room(20 - 4, 1)
    assert room(20, 10, batch=1, batch_max=8, growth_tokens=8, block_size=16) == Room(20 - 10 - 1, 7)
    assert room(2, 10, batch=1, batch_max=1, growth_tokens=8, block_size=16) == Room(0, 0)


def test_an_empty_instance_gives_all_it_has() -> None:
    assert room(20, 0, batch=0, batch_max=8, growth_tokens=8, block_size=16) == Room(20, 8)
    guessed_too_large = Waiter("r", NORMAL, 1.0, 10**9)
    assert started([guessed_too_large], place("a", 100)) == {"r": "a"}
    assert started([guessed_too_large], place("a", 99)) == {}


def test_what_was_sent_since_the_report_takes_room() -> None:
    view = instance("a", room_blocks=10, room_places=3)
    assert site(view, Sent()).room == Room(10, 3)
    assert site(view, Sent(requests=2, tokens=33)).room == Room(7, 1)


def test_without_the_plugin_an_instance_is_open_until_it_is_full_or_something_waits_there() -> None:
    plain = instance("p", managed=False, requests_running_max=0)
    for view, opens in (
        (plain, True),
        (instance("p", freeness=-1.0, managed=False), False),
        (instance("p", managed=False, requests_waiting=1), False),
        (instance("p", freeness=-1.0, managed=False, load_known=False), True),
    ):
        assert started([waiter("r", blocks=1_000)], site(view, Sent())) == ({"r": "p"} if opens else {}), view


WAITERS = st.lists(
    st.tuples(st.sampled_from(PriorityClass), st.integers(0, 60), st.integers(1, 40)), max_size=12, unique=True
)
SITES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4), st.integers(0, 9)), max_size=5)


@given(WAITERS, SITES, st.randoms(use_true_random=False))
def test_no_room_is_given_twice_and_every_gateway_comes_to_the_same(
    people: list[tuple[PriorityClass, int, int]], rooms: list[tuple[int, int, int]], chance: random.Random
) -> None:
    line = [waiter(f"r{n}", rank, waited, blocks) for n, (rank, waited, blocks) in enumerate(people)]
    sites = [place(f"i{n}", blocks, places, batch=batch) for n, (blocks, places, batch) in enumerate(rooms)]
    allotted = allot(line, sites, RULES)
    assert len({one.request_id for one in allotted}) == len(allotted)
    needs = {one.request_id: -(-one.tokens // BLOCK) for one in line}
    for one in sites:
        there = [needs[taken.request_id] for taken in allotted if taken.instance_id == one.instance_id]
        assert len(there) <= one.room.places
        assert sum(there) <= one.room.blocks
    shuffled, turned = list(line), list(sites)
    chance.shuffle(shuffled)
    chance.shuffle(turned)
    assert allot(shuffled, turned, RULES) == allotted
