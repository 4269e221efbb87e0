"""What a pairing lets its source move; the fakes obey the same."""

from __future__ import annotations

import dataclasses
from typing import Any

from gateway import wire
from gateway.policy.picking import Movable
from vllm_plugin.pairing import Paired

PAIRING = wire.Pairing("b", "http://b", 2_000, concurrency=2, cool_down_s=5.0, moves_max=3)


def paired(**changes: Any) -> Paired:
    found = Paired()
    found.set(dataclasses.replace(PAIRING, **changes), 0.0)
    return found


def request(by: Paired, name: str, tokens: int = 1, priority: int = 0, **changes: Any) -> Movable:
    values: dict[str, Any] = {"is_running": True, "moves": 0, "settled_s": None}
    return by.movable(name, priority, tokens, **(values | changes))


def chosen(by: Paired, *requests: Movable, places: int = 9, draining: bool = False) -> list[str]:
    return [order.request_id for order in by.choose(requests, places, draining=draining)]


def test_nothing_moves_a_fourth_time_or_within_its_cool_down() -> None:
    by = paired()
    fresh, often = request(by, "fresh", moves=1, settled_s=4.9), request(by, "often", moves=3, settled_s=9.0)
    assert chosen(by, fresh, often) == []
    assert chosen(by, fresh, often, request(by, "other", moves=2, settled_s=5.0)) == ["other"]
    assert chosen(by, fresh, often, draining=True) == ["often"]


def test_a_gateway_that_does_not_say_has_them_rest_for_a_second_and_move_however_often() -> None:
    by = paired(cool_down_s=None, moves_max=None)
    assert chosen(by, request(by, "a", moves=900, settled_s=1.0), request(by, "b", settled_s=0.9)) == ["a"]


def test_so_many_leave_at_once_and_none_after_the_lease() -> None:
    by = paired()
    assert [by.places(out, 2.0) for out in (0, 1, 2, 3)] == [2, 1, 0, 0]
    assert by.places(0, 2.1) == 0
    assert paired(concurrency=1_000).places(0, 1.0) == 4
    assert chosen(by, *(request(by, name, tokens) for name, tokens in zip("abc", (3, 1, 2), strict=True))) == []
    by = paired()
    some = [request(by, name, tokens) for name, tokens in zip("abc", (3, 1, 2), strict=True)]
    assert chosen(by, *some, places=2) == ["b", "c"]
    by.rest(0.5)
    assert [by.places(0, now) for now in (1.4, 1.6)] == [0, 2]


def test_the_lowest_class_leaves_first_and_what_is_protected_stays() -> None:
    by = paired(protected=[-100, -200])
    some = [request(by, word, 9 - index, priority) for index, (word, priority) in enumerate(CLASSES)]
    assert chosen(by, *some) == ["low", "normal", "lower_normal"]
    assert chosen(by, *some, draining=True)[-1] == "highest"


CLASSES = [("low", 100), ("lower_normal", -1), ("normal", 0), ("high", -100), ("highest", -201)]


def test_a_class_is_what_counts_down_from_it_and_there_may_be_any_number() -> None:
    classes = [wire.class_of(priority) for priority in (-(10**30), -200, -199, -100, -99, 0, 1, 100, 101, 10**30)]
    assert classes == [-1000, -200, -100, -100, 0, 0, 100, 100, 200, 1000]
