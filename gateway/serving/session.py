"""What is known of each request: what its client has been sent, where it runs, how it has moved."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gateway.cluster.records import Records
from gateway.cluster.store import Owner
from gateway.openai.body import GenerateBody
from gateway.openai.events import Chunk
from gateway.openai.meter import Meter
from gateway.openai.tokens import Tokens
from gateway.policy.view import ModelGroup
from gateway.serving.backend import Call
from gateway.serving.visit import Visit
from gateway.serving.waiting import Ticket

GAPS_MAX = 512


@dataclass(slots=True)
class Move:
    """One change of instance, as the client saw it. ``pause_ms``: from the last event before to the first after."""

    migration_id: str
    source_id: str
    destination_id: str
    output_tokens: int
    kind: str
    """``migrated``: the source moved it, with its KV or without; ``resumed``: the gateway did, after a failure."""
    pause_ms: float | None = None


@dataclass(slots=True)
class Session:
    """Token ids are all that is needed to go on with a request anywhere."""

    call: Call
    body: GenerateBody
    meter: Meter = field(default_factory=Meter)
    visit: Visit = field(default_factory=Visit)
    ticket: Ticket | None = None
    """Its place among those that wait for room, from its first look for an instance on."""
    instance_id: str | None = None
    group: ModelGroup | None = None
    """What its model is where it began."""
    output_token_ids: list[int] = field(default_factory=list)
    knows_all_tokens: bool = True
    """False once an event came without its token ids: then the count is the instance's word alone."""
    events_sent: int = 0
    whole_tokens: int = 0
    """Of a reply in one piece, by its own usage."""
    finished: bool = False
    usage_sent: bool = False
    created: bytes | None = None
    outcome: str = "running"
    moves: list[Move] = field(default_factory=list)
    failed_instances: set[str] = field(default_factory=set)
    losses: int = 0
    deaths: int = 0
    _gaps_ms: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_MAX))
    _event_at: float | None = None
    _pausing: Move | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        return self.call.request_id

    @property
    def can_resume(self) -> bool:
        return self.body.resumable and self.knows_all_tokens and not self.is_complete

    @property
    def is_complete(self) -> bool:
        """Nothing but [DONE] is missing."""
        return self.finished and self.body.resumable and (self.usage_sent or not self.body.wants_usage)

    @property
    def tokens_sent(self) -> int:
        """As far as they are known; never less than it was."""
        return len(self.output_token_ids) if self.events_sent else self.whole_tokens

    def restart(self) -> None:
        """Nothing has reached the client: what the lost leg had generated is forgotten."""
        assert self.events_sent == 0
        self.output_token_ids.clear()
        self.meter.restart()
        self.knows_all_tokens = True
        self.created = None

    def take(self, chunk: Chunk) -> None:
        """Called before the event is sent, for every event of the reply."""
        if chunk.token_ids is not None:
            self.output_token_ids += chunk.token_ids
        elif chunk.has_choice and not chunk.role:
            self.knows_all_tokens = False
        self.finished |= chunk.finished
        says_usage = chunk.usage and not chunk.has_choice
        self.usage_sent |= says_usage
        tokens = len(chunk.token_ids) if chunk.token_ids is not None else int(chunk.has_choice and not chunk.role)
        self.meter.event(chunk.block, tokens, usage=says_usage)

    def take_tokens(self, tokens: Tokens) -> None:
        """The same for events that say nothing else."""
        self.output_token_ids += tokens.token_ids
        self.meter.generated(tokens.events, len(tokens.token_ids))

    def expected_tokens(self, said: int) -> int:
        """The number of tokens that the next leg must follow on: our own count, where we have one."""
        known = len(self.output_token_ids)
        if not self.knows_all_tokens or not self.body.stream or (self.body.hides_reasoning and said > known):
            return said
        return known

    def sent(self, events: int, now: float) -> None:
        """``events`` of the reply went to the client together."""
        if self._pausing is not None:
            if self._event_at is not None:
                self._pausing.pause_ms = (now - self._event_at) * 1000
                self.visit.moved(self._pausing)
            self._pausing = None
            self._changed.set()
        elif self._event_at is not None:
            gap_s = (now - self._event_at) / events
            self._gaps_ms.append(gap_s * 1000)
            if self.visit.gaps is not None:
                self.visit.gaps.observe(gap_s, events)
        if self._event_at is None:
            self.visit.first_event(now)
        self._event_at = now
        self.events_sent += events

    def moved(self, move: Move) -> None:
        self.moves.append(move)
        self._pausing = move
        self._changed.set()

    def token_gap_ms(self) -> float | None:
        """Median time between events, moves left out."""
        return statistics.median(self._gaps_ms) if self._gaps_ms else None

    async def move_with_pause(self, migration_id: str, timeout_s: float) -> Move | None:
        """The move once its pause is known, or as far as it is known when the time is up or the request has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.outcome == "running":
                    move = self._move(migration_id)
                    if move is not None and move.pause_ms is not None:
                        break
                    self._changed.clear()
                    await self._changed.wait()
        return self._move(migration_id)

    async def left(self, instance_id: str, timeout_s: float) -> bool:
        """Whether the reply goes on elsewhere by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.outcome == "running" and self.instance_id == instance_id:
                    self._changed.clear()
                    await self._changed.wait()
        return self.outcome == "running" and self.instance_id != instance_id

    def own(self, instance_id: str) -> None:
        if self.instance_id != instance_id:
            self.visit.runs_at(instance_id)
        self.instance_id = instance_id
        self._changed.set()

    def not_admitted(self) -> None:
        """It has not run where it was just sent."""
        self.instance_id = None
        self.visit.did_not_run()

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        self._changed.set()

    def _move(self, migration_id: str) -> Move | None:
        return next((move for move in self.moves if move.migration_id == migration_id), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "path": self.call.path,
            "model": self.body.model,
            "stream": self.body.stream,
            "state": self.outcome,
            "instance": self.instance_id,
            "output_tokens": len(self.output_token_ids) if self.body.stream else None,
            "token_gap_ms": _rounded(self.token_gap_ms()),
            "moves": [
                {
                    "migration_id": move.migration_id,
                    "kind": move.kind,
                    "source": move.source_id,
                    "destination": move.destination_id,
                    "output_tokens": move.output_tokens,
                    "pause_ms": _rounded(move.pause_ms),
                }
                for move in self.moves
            ],
        }


OnMoved = Callable[[Session, Move], None]


def _nobody(session: Session, move: Move) -> None:
    pass


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


class Sessions:
    """All requests under way, and the last ones that ended."""

    def __init__(self, gateway_id: str, records: Records, recent_max: int) -> None:
        self._gateway_id = gateway_id
        self._records = records
        self._live: dict[str, Session] = {}
        self.on_moved: OnMoved = _nobody
        """Called after each move, once its pause is known."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=recent_max)

    @contextlib.contextmanager
    def tracked(self, session: Session) -> Iterator[Session]:
        self._live[session.request_id] = session
        session.visit.begins(session)
        session.visit.on_moved = self.on_moved
        try:
            yield session
        finally:
            del self._live[session.request_id]
            if session.outcome == "running":
                session.end("cancelled")
            session.visit.leaves(session)
            said = session.to_json()
            self._recent.append(said)
            self._records.forget(session.request_id)
            for move in said["moves"]:
                self._records.migrated({"request": session.request_id, "at": time.time(), **move})

    def owned_by(self, session: Session, instance_id: str) -> None:
        session.own(instance_id)
        self._records.own(session.request_id, Owner(self._gateway_id, instance_id, session.body.model or ""))

    def get(self, request_id: str) -> Session | None:
        return self._live.get(request_id)

    def count(self) -> int:
        return len(self._live)

    def all(self) -> Iterator[Session]:
        """Oldest first, for as long as nothing is awaited."""
        return iter(self._live.values())

    def tokens_live(self) -> Iterator[tuple[str, int]]:
        """Of each request under way: its model's label, and the tokens sent so far."""
        for session in self._live.values():
            yield session.visit.model, session.tokens_sent

    def live(self, most: int | None = None) -> list[dict[str, Any]]:
        return [session.to_json() for session in islice(self._live.values(), most)]

    def recent(self) -> list[dict[str, Any]]:
        """Newest first."""
        return list(reversed(self._recent))
