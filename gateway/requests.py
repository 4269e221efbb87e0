"""What operators ask about requests: of this gateway's at once, of another's through Redis (cluster/replicas.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.cluster.replicas import Replicas
from gateway.cluster.store import Store
from gateway.errors import Cancelled, StoreUnavailable
from gateway.policy.view import ModelGroup
from gateway.serving.deadline import Deadlines
from gateway.serving.session import Session, Sessions
from gateway.telemetry import log

LISTED_MAX = 1_000
"""Of one gateway, in one answer."""
PAUSE_WAIT_S = 5.0
"""A migration's result may be there before the first event of the destination: wait that long for the pause."""
FOLLOW_WAIT_S = 2.0
LOOK_S = 0.1
"""Between two questions to another gateway about the same request."""


Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True)
class Found:
    """A request, wherever its client is."""

    gateway_id: str
    shown: Mapping[str, Any]
    """As operators see it."""
    group: ModelGroup | None
    """What its model is where it began."""

    @property
    def is_running(self) -> bool:
        return self.shown.get("state") == "running"

    @property
    def instance_id(self) -> str | None:
        instance_id = self.shown.get("instance")
        return instance_id if isinstance(instance_id, str) else None


class OwnRequests:
    """Those whose clients are here."""

    def __init__(self, sessions: Sessions, deadlines: Deadlines) -> None:
        self._sessions = sessions
        self._deadlines = deadlines

    def session(self, request_id: str) -> Session | None:
        return self._sessions.get(request_id)

    def list(self) -> dict[str, Any]:
        return {
            "requests": self._sessions.live(LISTED_MAX),
            "recent": self._sessions.recent(),
            "running": self._sessions.count(),
        }

    def look(self, request_id: str) -> dict[str, Any]:
        """Empty if it is not known; else with its model's group, which is another one's business only."""
        session = self._sessions.get(request_id)
        if session is None:
            ended = next((one for one in self._sessions.recent() if one["id"] == request_id), None)
            return {} if ended is None else {"shown": ended, "group": None}
        group = session.group
        named = None if group is None else [group.name, group.root, group.parent]
        return {"shown": session.to_json(), "group": named}

    def cancel(self, request_id: str) -> bool:
        """Whether it was running. Its client is told, and its instances learn of it as if the client had gone."""
        ended = self._deadlines.end(request_id, Cancelled("An operator has cancelled this request."))
        if ended:
            log("cancel", request=request_id)
        return ended

    async def answer(self, kind: str, words: Mapping[str, Any]) -> dict[str, Any]:
        """Another gateway's question."""
        match kind:
            case "list":
                return self.list()
            case "look":
                return self.look(str(words["request"]))
            case "cancel":
                return {"cancelled": self.cancel(str(words["request"]))}
            case _:
                raise ValueError("not a question of this version")


class Requests:
    """Those of all gateways."""

    def __init__(self, gateway_id: str, own: OwnRequests, replicas: Replicas, store: Store) -> None:
        self._gateway_id = gateway_id
        self._own = own
        self._replicas = replicas
        self._store = store

    async def list(self) -> dict[str, Any]:
        """``complete``: whether all gateways that live have answered, with all that they have."""
        others = self._replicas.others
        try:
            answers = await self._replicas.ask(others, "list", {})
        except StoreUnavailable:
            answers = {}
        said = {self._gateway_id: self._own.list()} | {one: words for one, words in answers.items() if _is_list(words)}
        cut = any(len(one["requests"]) < one["running"] for one in said.values())
        return {
            "gateway": self._gateway_id,
            "gateways": [{"id": one, "answered": one in said} for one in sorted({self._gateway_id, *others})],
            "complete": self._store.up and others <= said.keys() and not cut,
            **{
                name: [{**one, "gateway": gateway_id} for gateway_id, words in said.items() for one in words[name]]
                for name in ("requests", "recent")
            },
        }

    async def find(self, request_id: str) -> Found | None:
        """Raises :class:`StoreUnavailable` if it is not this gateway's, and no other can be asked."""
        if own := self._own.look(request_id):
            return _found(self._gateway_id, own)
        answers = await self._ask(request_id, "look", lambda words: isinstance(words.get("shown"), dict))
        return _found(*answers) if answers is not None else None

    async def cancel(self, request_id: str) -> str | None:
        """The id of the gateway that has ended it; ``None`` if it runs nowhere. Raises as :meth:`find` does."""
        if self._own.cancel(request_id):
            return self._gateway_id
        answered = await self._ask(request_id, "cancel", lambda words: words.get("cancelled") is True)
        return answered[0] if answered is not None else None

    async def instance_of(self, request_id: str) -> str | None:
        """By its record alone: for one whose gateway does not answer."""
        owner = await self._store.owner(request_id)
        return owner.instance_id if owner is not None else None

    async def has_left(self, request_id: str, instance_id: str) -> bool:
        """Whether its reply goes on from another instance now, or does so soon."""
        session = self._own.session(request_id)
        if session is not None:
            return await session.left(instance_id, FOLLOW_WAIT_S)

        async def elsewhere() -> bool:
            found = await self.find(request_id)
            return found is not None and found.is_running and found.instance_id != instance_id

        return await _soon(elsewhere, FOLLOW_WAIT_S) or False

    async def pause(self, request_id: str, migration_id: str) -> dict[str, float | None]:
        """Of a move that is done: what the client saw, once that is known."""
        session = self._own.session(request_id)
        if session is not None:
            move = await session.move_with_pause(migration_id, PAUSE_WAIT_S) if session.body.stream else None
            return _pause(None if move is None else move.pause_ms, session.token_gap_ms())

        async def seen() -> dict[str, float | None] | None:
            found = await self.find(request_id)
            if found is None:
                return None
            pause_ms = _pause_of(found.shown.get("moves"), migration_id)
            is_known = pause_ms is not None or not found.is_running or not found.shown.get("stream")
            return _pause(pause_ms, found.shown.get("token_gap_ms")) if is_known else None

        try:
            return await _soon(seen, PAUSE_WAIT_S) or _pause(None, None)
        except StoreUnavailable:
            return _pause(None, None)

    async def _ask(
        self, request_id: str, kind: str, is_it: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[str, Mapping[str, Any]] | None:
        """First the gateway that has written that it holds it; all the others where that tells nothing: what cannot
        move has no such record, and Redis may have lost it."""
        owner = await self._store.owner(request_id)
        others = self._replicas.others
        first = {owner.gateway_id} & others if owner is not None else set[str]()
        for asked in (first, others - first):
            answers = await self._replicas.ask(asked, kind, {"request": request_id})
            for gateway_id, words in answers.items():
                if is_it(words):
                    return gateway_id, words
        return None


# Another gateway may be of another version: what it does not say is not known.


def _found(gateway_id: str, words: Mapping[str, Any]) -> Found:
    shown = {**words["shown"], "gateway": gateway_id}
    match words.get("group"):
        case [str(name), str() | None as root, str() | None as parent]:
            return Found(gateway_id, shown, ModelGroup(name, root, parent))
        case _:
            return Found(gateway_id, shown, None)


def _is_list(words: Mapping[str, Any]) -> bool:
    match words:
        case {"requests": [*requests], "recent": [*recent], "running": int()}:
            return all(isinstance(one, dict) for one in (*requests, *recent))
        case _:
            return False


def _pause_of(moves: object, migration_id: str) -> float | None:
    for move in moves if isinstance(moves, list) else ():
        match move:
            case {"migration_id": str(known), "pause_ms": float() | int() as pause_ms} if known == migration_id:
                return pause_ms
    return None


def _pause(pause_ms: float | None, token_gap_ms: float | None) -> dict[str, float | None]:
    return {"pause_ms": pause_ms, "token_gap_ms": token_gap_ms}


async def _soon(question: Callable[[], Awaitable[Answered]], wait_s: float) -> Answered:
    """The first answer that is one, or the last."""
    ends_at = time.monotonic() + wait_s
    while True:
        answer = await question()
        if answer or time.monotonic() >= ends_at:
            return answer
        await asyncio.sleep(LOOK_S)
