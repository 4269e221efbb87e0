"""What has happened, in words, with the numbers that it happened for.

Always written, since it is rare: what the leader decides, what operators order, and each move of a request. What
becomes of the instances is seen only while somebody looks. Everything is bounded, and nothing of a prompt is here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.cluster.members import Instance, Members
from gateway.policy.decide import Action, Pair, Unpair
from gateway.policy.view import InstanceView
from gateway.serving.session import Move, Session

ENTRIES_MAX = 100
TOLD_MAX = 20
"""Moves that another gateway is told of in one answer."""
WHYS_MAX = 1_024
WHY_HOLDS_S = 10.0
"""A pairing may last longer than the numbers that it was made for."""
_LONG_AGO_S = 3600.0


@dataclass(frozen=True, slots=True)
class Entry:
    sequence: int
    at: float
    """This process's monotonic clock."""
    wall_ms: int
    kind: str
    """decision, order, move or change."""
    text: str
    moved: Mapping[str, Any] | None = None
    gateway_id: str | None = None
    """Another gateway, that has seen it."""


class Journal:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._numbers = itertools.count(1)
        self._entries: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        self._moves: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        """Apart, so that a busy leader does not push them out."""
        self._whys: dict[str, tuple[str, str, float]] = {}
        """By source: the destination that the leader has given it, why, and when."""
        self._heard: dict[str, int] = {}
        """By gateway, the last of its moves that is here already."""
        self._states: dict[str, str] | None = None

    def decided(self, action: Action) -> None:
        """The leader's, a renewal left out."""
        match action:
            case Pair(source_id, destination_id):
                why = self._why(source_id, destination_id)
                self._whys[source_id] = (destination_id, why, time.monotonic())
                if len(self._whys) > WHYS_MAX:
                    del self._whys[next(iter(self._whys))]
                self._note("decision", f"{source_id} may move requests to {destination_id}: {why}")
            case Unpair(source_id):
                destination_id, _, _ = self._whys.pop(source_id, ("", "", 0.0))
                to = f" to {destination_id}" if destination_id else ""
                self._note("decision", f"{source_id} moves nothing more{to}: it has {_steps(self._view(source_id))}")

    def ordered(self, request_id: str, source: Instance, destination: Instance) -> None:
        """By an operator, or for a drain that one wants."""
        self._note(
            "order", f"{_short(request_id)} is ordered to move from {source.instance_id} to {destination.instance_id}"
        )

    def moved(self, session: Session, move: Move) -> None:
        shown = {
            "id": move.migration_id,
            "request": session.request_id,
            "source": move.source_id,
            "destination": move.destination_id,
            "kind": move.kind,
            "output_tokens": move.output_tokens,
            "pause_ms": _rounded(move.pause_ms),
            "token_gap_ms": _rounded(session.token_gap_ms()),
        }
        self._note("move", self._move_words(shown), shown)

    def look(self, states: Mapping[str, str]) -> None:
        """By instance, how it is now; changes since the last look are entries."""
        before, self._states = self._states, dict(states)
        if before is None:
            return
        for instance_id in sorted(before.keys() | states.keys()):
            old, new = before.get(instance_id), states.get(instance_id)
            if old != new:
                said = "is no more" if new is None else f"is {new} now" if old is None else f"is {new}, and was {old}"
                self._note("change", f"{instance_id} {said}")

    def forget_states(self) -> None:
        self._states = None

    def own_moves(self, now: float) -> list[dict[str, Any]]:
        """For another gateway: the newest, each with its age, since clocks differ."""
        own = [entry for entry in self._moves if entry.gateway_id is None]
        return [
            {"sequence": entry.sequence, "age_s": round(now - entry.at, 3), "text": entry.text, "moved": entry.moved}
            for entry in own[-TOLD_MAX:]
        ]

    def heard(self, gateway_id: str, moves: Sequence[object], now: float) -> None:
        """What another gateway says of its moves. It may be of another version: what is not known is left out."""
        for move in moves[:TOLD_MAX]:
            match move:
                case {
                    "sequence": int(sequence),
                    "age_s": float() | int() as age_s,
                    "text": str(text),
                    "moved": dict(one),
                }:
                    is_new = sequence > self._heard.get(gateway_id, 0) and 0 <= age_s < _LONG_AGO_S
                    if is_new and is_flat(one):
                        self._heard[gateway_id] = sequence
                        self._add("move", text, now - age_s, one, gateway_id)

    def keep(self, gateway_ids: set[str]) -> None:
        """Those that are there; what others have said stays, and who said it is forgotten."""
        self._heard = {one: sequence for one, sequence in self._heard.items() if one in gateway_ids}

    def to_json(self) -> list[dict[str, Any]]:
        """Newest first."""
        entries = {entry.sequence: entry for entry in (*self._entries, *self._moves)}
        newest = sorted(entries.values(), key=lambda entry: (entry.at, entry.sequence), reverse=True)
        return [
            {
                "sequence": entry.sequence,
                "at_ms": entry.wall_ms,
                "kind": entry.kind,
                "text": entry.text,
                "moved": entry.moved,
                "gateway": entry.gateway_id,
            }
            for entry in newest[: 2 * ENTRIES_MAX]
        ]

    def _note(self, kind: str, text: str, moved: Mapping[str, Any] | None = None) -> None:
        self._add(kind, text, time.monotonic(), moved)

    def _add(
        self, kind: str, text: str, at: float, moved: Mapping[str, Any] | None = None, gateway_id: str | None = None
    ) -> None:
        wall_ms = round((time.time() + at - time.monotonic()) * 1000)
        entry = Entry(next(self._numbers), at, wall_ms, kind, text, moved, gateway_id)
        (self._moves if kind == "move" else self._entries).append(entry)

    def _move_words(self, shown: Mapping[str, Any]) -> str:
        source_id, destination_id = shown["source"], shown["destination"]
        what = f"{_short(shown['request'])} from {source_id} to {destination_id}"
        if shown["kind"] == "resumed":
            return f"resumed {what} from its {shown['output_tokens']} tokens: {source_id} had lost it"
        to, why, decided_at = self._whys.get(source_id, ("", "", 0.0))
        if to != destination_id or time.monotonic() - decided_at > WHY_HOLDS_S:
            why = self._why(source_id, destination_id)
        return f"moved {what}: {why}"

    def _why(self, source_id: str, destination_id: str) -> str:
        source, destination = self._view(source_id), self._view(destination_id)
        if source is not None and source.draining:
            return f"{source_id} is draining, {destination_id} had {_steps(destination)}"
        why = f"{source_id} had {_steps(source)}, {destination_id} {_number(destination)}"
        if source is not None and source.head_of_line_blocks > 0:
            why += f"; head of line there waited for {source.head_of_line_blocks} blocks"
        return why

    def _view(self, instance_id: str) -> InstanceView | None:
        self._members.refresh(time.monotonic())  # A gateway without traffic has not looked for a while.
        return self._members.view_of(instance_id)


def is_flat(words: Mapping[str, Any]) -> bool:
    """Words and numbers that JSON has, and nothing within them: what another gateway says is said on as it came."""
    return all(
        value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        for value in words.values()
    )


def _steps(view: InstanceView | None) -> str:
    return f"{_number(view)} decode steps left"


def _number(view: InstanceView | None) -> str:
    if view is None or not math.isfinite(view.freeness_steps):
        return "an unknown number of"
    return f"{view.freeness_steps:.0f}"


def _short(request_id: str) -> str:
    return request_id[:8]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
