"""What has happened, in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import wire
from gateway.cluster.members import Instance, Members
from gateway.dashboard.journal import ENTRIES_MAX, TOLD_MAX, Journal
from gateway.policy.decide import Pair, Unpair
from tests.fake_instance import FakeInstance

NOW = 1000.0


def members(**freeness_steps: float) -> Members:
    found = Members(report_stale_s=60)
    for name, steps in freeness_steps.items():
        fake = FakeInstance(name, freeness_steps=steps)
        fake.report_changes = {"head_of_line_blocks": 96} if name == "a" else {}
        found.probed(Instance(name, f"http://{name}", fake.boot_id), [{"id": "m"}], True, None, NOW)
        found.reported(wire.Report.from_json(fake.report()), NOW)
    found.refresh(NOW)
    return found


def texts(journal: Journal) -> list[str]:
    return [entry["text"] for entry in journal.to_json()]


def test_a_decision_says_why() -> None:
    journal = Journal(members(a=12, c=976))
    journal.decided(Pair("a", "c"))
    journal.decided(Unpair("a"))
    why = "a had 12 decode steps left, c 976; head of line there waited for 96 blocks"
    assert texts(journal) == [
        "a moves nothing more to c: it has 12 decode steps left",
        f"a may move requests to c: {why}",
    ]


def test_what_becomes_of_an_instance_is_said_once() -> None:
    journal = Journal(members())
    for states in ({"a": "ready"}, {"a": "ready"}, {"a": "down", "b": "ready"}, {"a": "down"}):
        journal.look(states)
    assert texts(journal) == ["b is no more", "b is ready now", "a is down, and was ready"]


def test_it_is_bounded_and_moves_are_not_pushed_out() -> None:
    journal = Journal(members(a=12, c=976))
    journal.heard("other", [told(1)], NOW)
    for _ in range(3 * ENTRIES_MAX):
        journal.decided(Pair("a", "c"))
    entries = journal.to_json()
    assert len(entries) == ENTRIES_MAX + 1
    assert any(entry["kind"] == "move" for entry in entries)


def told(sequence: int, **changes: Any) -> dict[str, Any]:
    return {"sequence": sequence, "age_s": 1.0, "text": f"moved {sequence}", "moved": {"request": "r"}} | changes


def test_each_move_of_another_gateway_is_taken_once_whoever_else_has_such_numbers() -> None:
    journal = Journal(members())
    for gateway_id, moves in (("x", [told(1), told(2)]), ("x", [told(2), told(3)]), ("y", [told(1)])):
        journal.heard(gateway_id, moves, NOW)
    assert sorted(texts(journal)) == ["moved 1", "moved 1", "moved 2", "moved 3"]
    assert journal.own_moves(NOW) == []  # What came from others is not told on.
    journal.heard("z", [told(number) for number in range(1, 10 * TOLD_MAX)], NOW)
    assert len(journal.to_json()) == 4 + TOLD_MAX


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        told(1) | {"sequence": "1"},
        told(1, age_s=-1),
        told(1, age_s=float("nan")),
        told(1, text=None),
        told(1, moved=None),
        told(1, moved={"request": ["r"]}),
        told(1, moved={"pause_ms": float("inf")}),
    ],
)
def test_what_another_version_says_otherwise_is_left_out(wrong: Any) -> None:
    journal = Journal(members())
    journal.heard("x", [wrong], NOW)
    assert json.loads(json.dumps(journal.to_json(), allow_nan=False)) == []
