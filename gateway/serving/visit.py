"""What is told of a client's request when it ends, whatever way it does: one line in the log, counts, a trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.cluster.members import Members
from gateway.counters import OTHER, Counters, Distribution
from gateway.telemetry import log
from gateway.tracing import NO_TRACE, NO_TRACER, Trace, Tracer

if TYPE_CHECKING:
    from gateway.serving.reply import Reply
    from gateway.serving.session import Move, Session

MODEL_LABEL_LENGTH_MAX = 256
VISITED_MAX = 64
INSTANCES_SAID_MAX = 20
"""In the line: of a request that is passed round, the first ones and the last."""
QUIET_ROUTES = ("/health", "/ping")
"""Asked every few seconds by something that is no client: in the log at debug level only."""


@dataclass(slots=True)
class Visit:
    """One request of a client, from its arrival on. ``route`` is a template, ``model`` one that an instance serves."""

    request_id: str = ""
    counters: Counters = field(default_factory=Counters)
    trace: Trace = NO_TRACE
    started_at: float = field(default_factory=time.monotonic)
    method: str = ""
    route: str = OTHER
    model: str = OTHER
    client_id: str = "-"
    key_name: str | None = None
    """Of the API key that it came with, where keys have names. Never the key."""
    gone: bool = False
    """The client has left before the end."""
    visited: list[str] = field(default_factory=list)
    """Instances, in order."""
    session: Session | None = None
    """Of a request that can move."""
    tokens: int = 0
    """Of any other one: what its reply says in its usage."""
    ttft_s: float | None = None
    gaps: Distribution | None = None
    on_moved: Callable[[Session, Move], None] | None = None

    def names(self, model: str | None, members: Members) -> None:
        """The request is for ``model``."""
        if model is not None and len(model) <= MODEL_LABEL_LENGTH_MAX and members.knows_model(model):
            self.model = model

    def runs_at(self, instance_id: str) -> None:
        if len(self.visited) < VISITED_MAX:
            self.visited.append(instance_id)

    def did_not_run(self) -> None:
        """The last instance has not let it in."""
        if len(self.visited) < VISITED_MAX:
            self.visited.pop()

    def begins(self, session: Session) -> None:
        self.session = session
        self.gaps = self.counters.distribution("event_gap_seconds", model=self.model)

    def first_event(self, now: float) -> None:
        self.ttft_s = now - self.started_at
        self.counters.distribution("time_to_first_event_seconds", model=self.model).observe(self.ttft_s)
        self.trace.event("first_token")

    def moved(self, move: Move) -> None:
        """The first event after the move is here, or the request has ended without one."""
        attributes: dict[str, str | float] = {"migration": move.migration_id}
        attributes |= {"source": move.source_id, "destination": move.destination_id}
        if move.pause_ms is not None:
            self.counters.distribution("move_pause_seconds", kind=move.kind).observe(move.pause_ms / 1000)
            attributes["pause_ms"] = round(move.pause_ms, 3)
        self.trace.event(move.kind, **attributes)
        if self.on_moved is not None and self.session is not None:
            self.on_moved(self.session, move)

    def leaves(self, session: Session) -> None:
        """The session is over, and counted here from now on."""
        self.counters.add("output_tokens", session.tokens_sent, model=self.model)
        for move in session.moves:
            if move.pause_ms is None:
                self.moved(move)


class Visits:
    def __init__(self, counters: Counters, tracer: Tracer = NO_TRACER) -> None:
        self._counters = counters
        self._tracer = tracer

    def begin(self, request_id: str, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Visit:
        trace = self._tracer.begin(headers) if path.startswith("/v1/") else NO_TRACE
        return Visit(request_id, self._counters, trace, method=method)

    def end(self, visit: Visit, reply: Reply) -> None:
        outcome = _outcome(visit, reply)
        duration_s = time.monotonic() - visit.started_at
        self._counters.add("requests", route=visit.route, model=visit.model, outcome=outcome)
        if outcome == "2xx":
            durations = self._counters.distribution("request_duration_seconds", route=visit.route, model=visit.model)
            durations.observe(duration_s)
        session = visit.session
        tokens = session.tokens_sent if session is not None else visit.tokens
        if visit.tokens:
            self._counters.add("output_tokens", visit.tokens, model=visit.model)
        visit.trace.end(
            f"{visit.method} {visit.route}",
            outcome in ("5xx", "broken_stream"),
            **{"http.request.method": visit.method, "http.route": visit.route},
            **({"http.response.status_code": reply.status} if reply.status else {}),
            request_id=visit.request_id,
            model=visit.model,
            outcome=outcome,
            output_tokens=tokens,
        )
        log(
            "access",
            level=logging.DEBUG if visit.route in QUIET_ROUTES and outcome == "2xx" else logging.INFO,
            request=visit.request_id,
            client_id=visit.client_id,
            key=visit.key_name or "-",
            method=visit.method,
            route=visit.route,
            model=visit.model,
            status=reply.status,
            outcome=outcome,
            instances=_path(visit),
            moves=len(session.moves) if session is not None else 0,
            tokens=tokens,
            ttft_ms=None if visit.ttft_s is None else round(visit.ttft_s * 1000, 3),
            duration_ms=round(duration_s * 1000, 3),
            **({} if visit.trace.trace_id is None else {"trace": visit.trace.trace_id}),
        )


def _outcome(visit: Visit, reply: Reply) -> str:
    """One of a fixed set. ``broken_stream``: it began as 200, and an error event was its end."""
    if visit.gone:
        return "client_gone"
    if not reply.ended:
        return "cancelled"  # The gateway itself is ending.
    failed = reply.broken or (visit.session is not None and visit.session.outcome == "failed")
    if failed and reply.status < 400:
        return "broken_stream"
    return f"{reply.status // 100}xx" if 200 <= reply.status < 600 else OTHER


def _path(visit: Visit) -> str:
    """``a>b``: where the request has been."""
    visited = visit.visited
    if len(visited) > INSTANCES_SAID_MAX:
        visited = [*visited[: INSTANCES_SAID_MAX - 1], "...", visited[-1]]
    return ">".join(visited) or "-"
