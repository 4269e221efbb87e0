"""Requests that do not move: passed on to one instance, and its reply back, byte for byte.

The counterpart of serve.py for all other endpoints. While nothing has reached the client, a lost leg is made good on
another instance, if doing it twice changes nothing; afterwards the reply ends with an error in its own shape.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from gateway.cluster.members import Instance, Members
from gateway.cluster.responses import StoredResponses
from gateway.config import Budgets, Limits
from gateway.counters import Counters
from gateway.errors import (
    GatewayError,
    LegCut,
    LegError,
    LegNotConnected,
    LegRefused,
    LegUnreachable,
    NoInstance,
    NotFound,
    ResponseNotFound,
)
from gateway.openai import events, sse
from gateway.openai.dialects import Dialect
from gateway.serving.backend import Backend, Call, Head, Leg
from gateway.serving.deadline import Deadlines
from gateway.serving.dispatch import Dispatcher
from gateway.serving.relay import first_bytes
from gateway.serving.reply import Reply
from gateway.serving.serve import DEATHS_MAX, LOSSES_MAX
from gateway.serving.visit import Visit
from gateway.serving.waiting import Waiting
from gateway.telemetry import log
from gateway.wire import PriorityClass, is_identifier

WHOLE_BYTES_MAX = 4 * 1024 * 1024
"""A reply of a kind that we do not read is held back up to this size, so that it comes whole or not at all."""

_LOOK_FIELDS = ("stream", "starting_after")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9._:-]{1,120})"')
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})')
_LINE, _END = rb"(?:\A|[\r\n])", rb"[ \t]*(?=[\r\n]|\Z)"
_LAST_EVENT = {
    Dialect.OPENAI: re.compile(_LINE + rb'data: ?(?:\[DONE\]|\{\s*"error")'),
    Dialect.RESPONSES: re.compile(
        _LINE + rb"event: ?(?:response\.(?:completed|failed|incomplete|cancelled)|error)" + _END
    ),
    Dialect.MESSAGES: re.compile(_LINE + rb"event: ?(?:message_stop|error)" + _END),
}
_ERROR_EVENT = re.compile(_LINE + rb"(?:event: ?(?:error|response\.failed)" + _END + rb'|data: ?\{\s*"error")')


@dataclass(frozen=True, slots=True)
class Forward:
    """``load_bytes``: how much of the body is work for the model, as dispatch guesses it."""

    call: Call
    dialect: Dialect
    model: str | None = None
    priority_class: PriorityClass = PriorityClass.NORMAL
    key_id: str = ""
    needs_room: bool = False
    """It generates, and so waits while no instance has room."""
    stream: bool = False
    load_bytes: int = 0
    repeatable: bool = True
    home_of: str | None = None
    """A response id: only the instance that holds it will do."""
    keeps: bool = False
    """The reply may be a response that its instance stores."""
    ends_itself: bool = True
    """A stream of it is whole only with its last event."""


def look_query(query: bytes) -> str:
    """What vLLM reads of the query of a stored response, written anew. Nothing else of a client's query goes on."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    kept = [(name, value) for name, value in pairs if name in _LOOK_FIELDS and len(value) <= 32]
    return "?" + urlencode(kept) if kept else ""


class Forwarder:
    def __init__(
        self,
        members: Members,
        dispatcher: Dispatcher,
        waiting: Waiting,
        deadlines: Deadlines,
        backend: Backend,
        stored: StoredResponses,
        budgets: Budgets,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._members = members
        self._dispatcher = dispatcher
        self._waiting = waiting
        self._deadlines = deadlines
        self._backend = backend
        self._stored = stored
        self._budgets = budgets
        self._limits = limits
        self._counters = counters

    async def forward(self, forward: Forward, reply: Reply) -> None:
        """Cancelled when the client has gone."""
        try:
            async with self._deadlines.bounded(forward.call.request_id):
                await self._forward(forward, reply)
        except GatewayError as error:
            self._counters.add("errors", kind=error.label)
            reason = error.message if isinstance(error, LegError) else error.label
            log("failed", level=logging.WARNING, request=forward.call.request_id, reason=reason)
            if isinstance(error, LegError) and error.reply is not None and not reply.started:
                await reply.whole(error.reply)
            else:
                await reply.fail(error)

    async def _forward(self, forward: Forward, reply: Reply) -> None:
        failed: set[str] = set()
        losses = deaths = 0
        instance = await self._first(forward)
        while True:
            passing = _Passing(self._stored, self._budgets, self._limits, forward, reply)
            try:
                with self._open_at(instance, forward, reply.visit) as leg:
                    await passing.run(leg)
                self._members.leg_worked(instance)
                return
            except LegError as error:
                self._members.leg_lost(instance, error, time.monotonic())
                self._counters.add("legs_lost", kind=error.label)
                reason, request = error.message, forward.call.request_id
                log("leg_lost", level=logging.WARNING, request=request, instance=error.instance_id, reason=reason)
                failed.add(error.instance_id)
                losses, deaths = losses + 1, deaths + error.is_death
                again = forward.repeatable or not error.is_death
                if passing.bytes_sent or not again or losses > LOSSES_MAX or deaths >= DEATHS_MAX:
                    raise
                instance = await self._next(forward, failed, error)

    def _open_at(self, instance: Instance, forward: Forward, visit: Visit) -> Leg:
        self._counters.add("legs", instance_id=instance.instance_id, kind="forwarded")
        visit.runs_at(instance.instance_id)
        trace = visit.trace.leg(instance.instance_id, instance.boot_id, "forwarded")
        trace.outcome("cancelled")
        call = dataclasses.replace(forward.call, headers=trace.headers(forward.call.headers))
        release = self._dispatcher.hold(instance.instance_id, forward.load_bytes)
        leg = self._backend.open(instance, call, release, stream=forward.stream)
        leg.trace = trace
        return leg

    async def _first(self, forward: Forward) -> Instance:
        if forward.home_of is not None:
            return await self._home(forward.home_of)
        if forward.needs_room:
            request_id, size = forward.call.request_id, forward.load_bytes
            return await self._waiting.start(
                self._waiting.ticket(request_id, forward.model, forward.priority_class, size, forward.key_id)
            )
        return await self._waiting.choose(forward.model, is_new=True)

    async def _next(self, forward: Forward, failed: set[str], error: LegError) -> Instance:
        """Raises ``error`` when there is none."""
        if forward.home_of is not None:
            if isinstance(error, LegUnreachable | LegNotConnected):
                raise NoInstance("The instance that holds this response cannot be reached now.") from error
            raise error
        try:
            return await self._waiting.choose(forward.model, failed, is_new=False)
        except (NoInstance, NotFound):
            raise error from None

    async def _home(self, response_id: str) -> Instance:
        """Never a random instance: it would say of a response that is there that there is none."""
        home = await self._stored.find(response_id) if is_identifier(response_id) else None
        if home is None:
            raise ResponseNotFound(response_id[:128])
        instance = self._members.get(home.instance_id)
        if instance is not None and instance.boot_id != home.boot_id:
            raise ResponseNotFound(response_id, " The server that held it has been restarted.")
        if instance is None or not self._members.is_healthy(home.instance_id):
            raise NoInstance("The instance that holds this response does not answer now. Try again later.")
        self._dispatcher.check_room(home.instance_id)
        return instance


class _Passing:
    """One leg's reply on its way to the client."""

    def __init__(
        self,
        stored: StoredResponses,
        budgets: Budgets,
        limits: Limits,
        forward: Forward,
        reply: Reply,
    ) -> None:
        self.bytes_sent = 0
        self._stored = stored
        self._budgets = budgets
        self._limits = limits
        self._forward = forward
        self._reply = reply
        self._keeps = forward.keeps
        self._complete = False

    async def run(self, leg: Leg) -> None:
        try:
            await self._run(leg)
        except LegError as error:
            leg.trace.outcome(f"lost: {error.label}")
            raise
        leg.trace.outcome("ended")

    async def _run(self, leg: Leg) -> None:
        """The client is told nothing before the instance's verdict is known."""
        head = await leg.head()
        if 200 <= head.status < 300 and head.is_event_stream:
            await self._stream(leg, head)
        elif head.status >= 300 or self._reply.started or _is_read_whole(head):
            await self._whole(leg)
        else:
            await self._raw(leg, head)

    async def _whole(self, leg: Leg) -> None:
        whole = await leg.whole(self._limits.reply_bytes)
        message = f"The instance answered with HTTP {whole.status}."
        if whole.status >= 500 and whole.status != 501:  # 501: the model cannot do that, here or elsewhere.
            kind = LegRefused if whole.status == 503 else LegError
            raise kind(leg.instance_id, message, reply=whole)
        if self._reply.started:
            raise LegError(leg.instance_id, message, instance_at_fault=False)
        if whole.status < 300:
            await self._keep(whole.body, leg)
            self._count_tokens(whole.body)
        body = events.hide_transfers(whole.body)
        self.bytes_sent += len(body)
        await self._reply.whole(type(whole)(whole.status, whole.headers, body))

    async def _stream(self, leg: Leg, head: Head) -> None:
        splitter = sse.BlockSplitter()
        try:
            data = await first_bytes(leg, head, self._reply, self._budgets.header_grace_s)
            while data:
                await self._pass_on(splitter.feed(data), leg, head)
                data = await leg.read()
            if (rest := splitter.rest()) and (last := _completed(rest)):
                await self._pass_on([last], leg, head)
        except sse.BlockTooLarge as error:
            raise LegCut(leg.instance_id, f"The instance sent {error}.") from error
        except LegError:
            if not self._complete:
                raise
        if self._forward.ends_itself and not self._complete:
            raise LegCut(leg.instance_id, "The instance's stream ended before its reply was complete.")
        await self._reply.start_stream(head.end_to_end())
        await self._reply.end()

    async def _pass_on(self, blocks: list[bytes], leg: Leg, head: Head) -> None:
        if not blocks:
            return
        data = events.hide_transfers(b"".join(blocks))
        await self._keep(data, leg)
        if (numbers := _SEQUENCE_NUMBER.findall(data)) and self._forward.dialect is Dialect.RESPONSES:
            self._reply.sequence_number = int(numbers[-1]) + 1
        if _ERROR_EVENT.search(data) is not None:
            self._reply.broken = True
        if b'"usage"' in data:
            self._count_tokens(data)
        self._reply.meter.passed(data, len(blocks))
        self._complete = self._complete or _LAST_EVENT[self._forward.dialect].search(data) is not None
        if self._complete:
            await self._reply.ending()
        await self._reply.start_stream(head.end_to_end())
        self.bytes_sent += len(data)
        await self._reply.write(data)

    def _count_tokens(self, data: bytes) -> None:
        """A look at a reply that was made before makes none."""
        if self._forward.call.body:
            self._reply.visit.tokens = events.completion_tokens(data)

    async def _raw(self, leg: Leg, head: Head) -> None:
        """Of a kind and size that are not read. Cut short, it ends with the connection."""
        length = head.headers.get("content-length")
        headers = [*head.end_to_end(), *([("content-length", length)] if length is not None else [])]
        data = await leg.read()
        await self._reply.start(head.status, headers)
        try:
            while data:
                self.bytes_sent += len(data)
                if length == str(self.bytes_sent):
                    await self._reply.ending()
                await self._reply.write(data)
                data = await leg.read()
        except LegError:
            self._reply.abandon()
            raise
        await self._reply.end()

    async def _keep(self, data: bytes, leg: Leg) -> None:
        """Where the response is kept that this reply is, or begins with."""
        if self._keeps and (found := _RESPONSE_ID.search(data)) is not None:
            self._keeps = False
            await self._stored.keep(found[1].decode(), leg.instance)


def _is_read_whole(head: Head) -> bool:
    media_type = head.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return True
    length = head.headers.get("content-length", "")
    return length.isascii() and length.isdecimal() and int(length) <= WHOLE_BYTES_MAX


def _completed(rest: bytes) -> bytes | None:
    """A last event without its blank line, if it is one that says something whole."""
    last = events.completed(rest)
    return last if last is not None or sse.data(rest) is not None else rest
