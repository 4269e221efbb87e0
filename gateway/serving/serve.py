"""A request's life, in order. Read this first.

1. The client's body has been read and checked (openai/body.py); the request gets an id that is the gateway's own.
2. Dispatch picks the instance with the highest freeness among those that have room for it, and a leg is opened there.
   While none has, or the one that was picked says that it is busy, the request waits here (waiting.py).
3. The leg's reply goes to the client as it comes (relay.py); the token ids in it are kept (session.py).
4. The source may say that it is moving the request. The same request is opened at the destination ahead of time
   (prebound.py), and when the source says that it has moved, the reply goes on from there.
5. A leg that is lost is made good, by the first of these that is possible: start again while nothing has reached the
   client; resume elsewhere from the tokens so far; say honestly that it failed.
6. However this ends, every leg is closed, which is how the instances learn of it, and every count is given back.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from typing import assert_never

from gateway import wire
from gateway.cluster.members import Members
from gateway.counters import Counters
from gateway.errors import Cancelled, GatewayError, LegError, LegUnreachable, NoInstance, NotFound, ResumeFailed
from gateway.openai.body import GenerateBody
from gateway.serving.backend import Backend, Call, Leg, Resumption
from gateway.serving.deadline import Deadlines
from gateway.serving.dispatch import Dispatcher
from gateway.serving.prebound import Prebound
from gateway.serving.relay import Ended, Left, Lost, NotAdmitted, Outcome, Relay
from gateway.serving.reply import Reply
from gateway.serving.session import Move, Session, Sessions
from gateway.serving.waiting import Waiting
from gateway.telemetry import log

DEATHS_MAX = 2
"""Instances that may fail under one request. It may be what they failed of, so a third one is not tried."""
LOSSES_MAX = 4
"""Legs that may be lost in all: those too whose instance was out of reach or refused, for no fault of the request."""
MOVES_MAX = 1_000
"""A bound against instances that pass a request round for ever."""


class Server:
    def __init__(
        self,
        members: Members,
        dispatcher: Dispatcher,
        waiting: Waiting,
        deadlines: Deadlines,
        backend: Backend,
        relay: Relay,
        sessions: Sessions,
        moved_s: float,
        counters: Counters,
    ) -> None:
        self._members = members
        self._dispatcher = dispatcher
        self._waiting = waiting
        self._deadlines = deadlines
        self._backend = backend
        self._relay = relay
        self._sessions = sessions
        self._moved_s = moved_s
        self._counters = counters

    async def serve(self, call: Call, body: GenerateBody, reply: Reply) -> None:
        """Cancelled when the client has gone."""
        session = Session(call, body, reply.meter, reply.visit)
        with self._sessions.tracked(session), Prebound(session, self._open_at) as prebound:
            try:
                async with self._deadlines.bounded(session.request_id):
                    await self._serve(session, prebound, reply)
            except GatewayError as error:
                session.end("cancelled" if isinstance(error, Cancelled) else "failed")
                self._counters.add("errors", kind=error.label)
                # Of the other kinds the message quotes what the client has chosen.
                reason = error.message if isinstance(error, LegError) else error.label
                log("failed", level=logging.WARNING, request=session.request_id, reason=reason)
                await _fail(reply, error)

    async def _serve(self, session: Session, prebound: Prebound, reply: Reply) -> None:
        leg = await self._start(session)
        while True:
            with leg:
                self._sessions.owned_by(session, leg.instance_id)
                leg.trace.outcome("cancelled")
                outcome = await self._relay.run(leg, session, prebound, reply)
                leg.trace.outcome(_said(outcome))
            match outcome:
                case Ended():
                    self._members.leg_worked(leg.instance)
                    return
                case Left(moved):
                    self._members.leg_worked(leg.instance)
                    leg = await self._follow(session, moved, prebound)
                case Lost(error):
                    prebound.close()
                    self._members.leg_lost(leg.instance, error, time.monotonic())
                    leg = await self._recover(session, error)
                case NotAdmitted(busy):
                    self._members.leg_worked(leg.instance)
                    assert session.ticket is not None
                    session.not_admitted()
                    self._waiting.was_busy(session.ticket, leg.instance, busy)
                    leg = await self._start(session, "restarted" if session.losses else "first")
                case _:
                    assert_never(outcome)

    async def _start(self, session: Session, kind: str = "first") -> Leg:
        """A leg from the first token on, where there is room for it."""
        body = session.body
        if session.ticket is None:
            asked, size = body.asked, len(session.call.body)
            session.ticket = self._waiting.ticket(
                session.request_id, body.model, asked.priority_class, size, asked.key_id
            )
        instance = await self._waiting.start(session.ticket, session.failed_instances, is_new=kind == "first")
        log("dispatch", level=logging.DEBUG, request=session.request_id, instance=instance.instance_id)
        session.group = self._members.group(instance.instance_id, session.body.model)
        starts_now = self._waiting.marks(instance, is_one_sequence=body.resumable)
        leg = self._open_at(session, instance.instance_id, kind=kind, starts_now=starts_now)
        assert leg is not None
        return leg

    async def _follow(self, session: Session, moved: wire.Moved, prebound: Prebound) -> Leg:
        """To the destination that the source named. What comes there is checked against our own count of tokens."""
        expected = session.expected_tokens(moved.output_tokens)
        if len(session.moves) >= MOVES_MAX or expected != moved.output_tokens:
            prebound.close()
            miscounted = ResumeFailed(moved.destination_id, "The instance miscounted.", instance_at_fault=False)
            return await self._recover(session, miscounted)
        leg = prebound.take(moved, expected)
        if leg is None:
            unknown = LegUnreachable(moved.destination_id, "The instance that the request has moved to is not known.")
            return await self._recover(session, unknown)
        if session.body.stream:  # A reply in one piece comes when the whole generation is done.
            leg.head_budget_s = self._moved_s
        self._note_move(session, moved.migration_id, leg.instance_id, moved.output_tokens, "migrated")
        return leg

    async def _recover(self, session: Session, error: LegError) -> Leg:
        """Raises ``error`` when nothing more can be done."""
        while True:
            self._note_loss(session, error)
            if not _can_go_on(session):
                raise error
            try:
                return await self._restart(session) if session.events_sent == 0 else await self._resume(session)
            except (NoInstance, NotFound):  # NotFound: the last instance with the model has been forgotten.
                raise error from None
            except LegError as another:
                error = another

    async def _restart(self, session: Session) -> Leg:
        """Nothing has reached the client, so nothing can be said twice."""
        session.restart()
        self._counters.add("requests_restarted")
        return await self._start(session, "restarted")

    async def _resume(self, session: Session) -> Leg:
        """A leg that goes on from the tokens that the client has been sent, on any instance with the plugin, wherever
        they were made: it recomputes."""
        unfit = session.failed_instances | self._dispatcher.without_plugin()
        instance = await self._waiting.choose(session.body.model, unfit, session.group, is_new=False)
        resume_id = uuid.uuid4().hex
        tokens = list(session.output_token_ids)
        try:
            moves = sum(move.kind == "migrated" for move in session.moves)
            await self._backend.put_resume(instance, resume_id, wire.Resume(session.request_id, tokens, moves))
        except LegError as error:
            self._members.leg_lost(instance, error, time.monotonic())
            error.is_death = False  # It had not begun with the request.
            raise
        leg = self._open_at(session, instance.instance_id, Resumption(resume_id, len(tokens), own=True), kind="resumed")
        if leg is None:
            raise LegUnreachable(instance.instance_id, "The instance has just gone.")
        self._note_move(session, resume_id, instance.instance_id, len(tokens), "resumed")
        return leg

    def _open_at(
        self,
        session: Session,
        instance_id: str,
        resumption: Resumption | None = None,
        *,
        kind: str = "migrated",
        starts_now: bool = False,
    ) -> Leg | None:
        instance = self._members.get(instance_id)
        if instance is None or (resumption is not None and not instance.managed):
            return None
        self._counters.add("legs", instance_id=instance_id, kind=kind)
        release = self._dispatcher.hold(instance_id, len(session.call.body))
        trace = session.visit.trace.leg(instance_id, instance.boot_id, kind)
        headers = trace.headers(session.call.headers)
        if starts_now:
            headers = (*headers, (wire.ADMIT_HEADER, wire.ADMIT_NOW))
        call = dataclasses.replace(session.call, headers=headers)
        leg = self._backend.open(instance, call, release, stream=session.body.stream, resumption=resumption)
        leg.trace = trace
        return leg

    def _note_move(self, session: Session, migration_id: str, to: str, output_tokens: int, kind: str) -> None:
        source = session.instance_id or ""
        session.moved(Move(migration_id, source, to, output_tokens, kind))
        self._counters.add(f"requests_{kind}")
        log(kind, request=session.request_id, migration=migration_id, source=source, to=to, tokens=output_tokens)

    def _note_loss(self, session: Session, error: LegError) -> None:
        session.losses += 1
        if error.instance_at_fault:
            session.failed_instances.add(error.instance_id)
            session.deaths += error.is_death
        self._counters.add("legs_lost", kind=error.label)
        request, instance = session.request_id, error.instance_id
        log("leg_lost", level=logging.WARNING, request=request, instance=instance, reason=error.message)


def _said(outcome: Outcome) -> str:
    match outcome:
        case Ended():
            return "ended"
        case Left():
            return "left"
        case Lost(error):
            return f"lost: {error.label}"
        case NotAdmitted():
            return "busy"
        case _:
            assert_never(outcome)


def _can_go_on(session: Session) -> bool:
    if session.losses > LOSSES_MAX or session.deaths >= DEATHS_MAX:
        return False
    return session.events_sent == 0 or session.can_resume


async def _fail(reply: Reply, error: GatewayError) -> None:
    """An instance's own last word, where there is one, as a status or as an event; else ours. Nothing follows it."""
    if isinstance(error, LegError) and error.reply is not None and not reply.started:
        await reply.whole(error.reply)
    elif isinstance(error, LegError) and error.event is not None and not reply.ended:
        await reply.write(error.event)
        await reply.end()
    else:
        await reply.fail(error)
