"""One leg's reply to the client, until it ends, moves away or is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from gateway import wire
from gateway.config import Budgets, Limits
from gateway.errors import LegCut, LegError, LegRefused, ResumeFailed, WholeReply
from gateway.openai import events, sse
from gateway.openai.events import Chunk, Done, Other
from gateway.openai.tokens import RunItem, Tokens, read_run, read_tokens
from gateway.serving.backend import Head, Leg, Resumption
from gateway.serving.prebound import Prebound
from gateway.serving.reply import Reply
from gateway.serving.session import Session


@dataclass(frozen=True, slots=True)
class Ended:
    """The client has the whole reply."""


@dataclass(frozen=True, slots=True)
class Left:
    """The request has moved; the reply goes on at the destination."""

    moved: wire.Moved


@dataclass(frozen=True, slots=True)
class Lost:
    """The leg is of no more use, and the reply is not complete."""

    error: LegError


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """The instance cannot start the request now, and has not taken it."""

    busy: wire.Busy


Outcome = Ended | Left | Lost | NotAdmitted


class Relay:
    def __init__(self, budgets: Budgets, limits: Limits) -> None:
        self._budgets = budgets
        self._limits = limits

    async def run(self, leg: Leg, session: Session, prebound: Prebound, reply: Reply) -> Outcome:
        """The client is told nothing before the instance's verdict is known."""
        try:
            head = await leg.head()
            if (moved := _moved(head)) is not None:
                return Left(moved)
            if (busy := _busy(head)) is not None:
                return NotAdmitted(busy)
            if leg.resumption is not None:
                _check_resumed(leg.instance_id, leg.resumption, head)
            if 200 <= head.status < 300 and head.is_event_stream:
                return await self._stream(leg, head, session, prebound, reply)
            return await self._whole(leg, session, reply)
        except LegError as error:
            if session.is_complete:  # It has died on its last word, and the client has all the others.
                session.end("done")
                await reply.write(sse.DONE)
            elif session.outcome != "failed":
                return Lost(error)
            await reply.end()  # The instance may have said itself that it failed: nothing may follow that.
            return Ended()

    async def _whole(self, leg: Leg, session: Session, reply: Reply) -> Outcome:
        """As it came: a JSON answer, or a refusal. Only the instance's own failures are tried elsewhere."""
        whole = await leg.whole(self._limits.reply_bytes)
        message = f"The instance answered with HTTP {whole.status}."
        if whole.status >= 500:
            return Lost(_failed(leg.instance_id, message, whole))
        if whole.status < 300 and events.failure(whole.body) is not None:
            return Lost(LegError(leg.instance_id, "The instance aborted the request."))
        if reply.started:
            return Lost(LegError(leg.instance_id, message, instance_at_fault=False))
        session.whole_tokens = events.completion_tokens(whole.body)
        session.end("done" if whole.status < 400 else "refused")
        await reply.whole(dataclasses.replace(whole, body=events.hide_transfers(whole.body)))
        return Ended()

    async def _stream(self, leg: Leg, head: Head, session: Session, prebound: Prebound, reply: Reply) -> Outcome:
        splitter = sse.BlockSplitter()
        sink = partial(self._pass_at_once, splitter, leg, session, reply)
        data = await first_bytes(leg, head, reply, self._budgets.header_grace_s)
        while data:
            try:
                items = _items(splitter, data, session)
            except (sse.BlockTooLarge, events.MalformedEvent) as error:
                raise LegCut(leg.instance_id, f"The instance sent {error}.") from error
            outcome = await self._pass_on(items, leg, head, session, prebound, reply)
            if outcome is not None:
                return outcome
            data = await leg.read(sink)
        if (last := events.completed(splitter.rest())) is not None:
            outcome = await self._pass_on(list(events.read_block(last)), leg, head, session, prebound, reply)
            if outcome is not None:
                return outcome
        if session.is_complete:
            return await self._end(sse.DONE, 0, session, head, reply)
        raise LegCut(leg.instance_id, "The instance's stream ended before its reply was complete.")

    def _pass_at_once(self, splitter: sse.BlockSplitter, leg: Leg, session: Session, reply: Reply, data: bytes) -> bool:
        """Most of a stream: whole token events, for a client that takes them. No task has to wake for those."""
        if not reply.can_write or session.finished or not splitter.is_run(data):
            return False
        if (tokens := read_tokens(data, not session.body.wants_token_ids)) is None:
            return False
        shown = self._show_tokens(tokens, leg, session)
        session.sent(tokens.events, time.monotonic())
        reply.write_at_once(shown)
        return True

    async def _pass_on(
        self, items: list[RunItem], leg: Leg, head: Head, session: Session, prebound: Prebound, reply: Reply
    ) -> Outcome | None:
        """One read's blocks, in one write. ``None``: the stream goes on."""
        out: list[bytes] = []
        count = 0
        for item in items:
            match item:
                case Tokens():
                    if not (session.finished and leg.resumption is not None):  # Else it says again: see _show.
                        out.append(self._show_tokens(item, leg, session))
                        count += item.events
                case Chunk(failure=int() as status):
                    await self._write(out, count, session, head, reply)
                    return Lost(_failed_within(leg.instance_id, item, status))
                case Chunk():
                    shown = self._show(item, leg, session)
                    count += shown is not None
                    out += [shown] if shown is not None else []
                case Other(block):
                    out.append(block)
                case wire.Prebind():
                    prebound.bind(item)
                case wire.Unbind():
                    prebound.unbind(item)
                case wire.Moved():
                    await self._write(out, count, session, head, reply)
                    return Left(item)
                case Done(block):
                    return await self._end(b"".join([*out, block]), count, session, head, reply)
                case _:
                    assert_never(item)
        await self._write(out, count, session, head, reply)
        return None

    def _show(self, chunk: Chunk, leg: Leg, session: Session) -> bytes | None:
        """The event as the client should see it, or ``None`` for one that it should not."""
        # The leg before was lost after it had opened the reply and before its first token, or just before the usage.
        says_again = (chunk.role and session.events_sent > 0) or (chunk.has_choice and session.finished)
        if says_again and leg.resumption is not None:
            return None
        session.take(chunk)
        if chunk.error:
            session.end("failed")
        block = events.hide_transfers(chunk.block)
        if not session.body.wants_token_ids:
            if chunk.empty and chunk.token_ids is not None:
                return None
            block = events.hide_token_ids(block)
        if session.created is None:
            session.created = events.created(block)
        elif leg.resumption is not None:
            block = events.with_created(block, session.created)
        return block

    def _show_tokens(self, tokens: Tokens, leg: Leg, session: Session) -> bytes:
        session.take_tokens(tokens)
        if session.created is None:
            session.created = events.created(tokens.data)
        elif leg.resumption is not None:
            return events.with_created_everywhere(tokens.data, session.created)
        return tokens.data

    async def _write(self, out: list[bytes], count: int, session: Session, head: Head, reply: Reply) -> None:
        if out:
            if count:
                session.sent(count, time.monotonic())
            if not reply.started:
                await reply.start_stream(head.end_to_end())
            await reply.write(out[0] if len(out) == 1 else b"".join(out))

    async def _end(self, data: bytes, count: int, session: Session, head: Head, reply: Reply) -> Outcome:
        await reply.ending()
        await self._write([data], count, session, head, reply)
        session.end("failed" if session.outcome == "failed" else "done")
        await reply.end()
        return Ended()


async def first_bytes(leg: Leg, head: Head, reply: Reply, grace_s: float) -> bytes:
    """A stream may fail right after its head; after a short grace the client gets the status and waits on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            return await leg.read()
    await reply.start_stream(head.end_to_end())
    return await leg.read()


def _items(splitter: sse.BlockSplitter, data: bytes, session: Session) -> list[RunItem]:
    if (run := splitter.run(data)) is not None:
        return read_run(run, hide_token_ids=not session.body.wants_token_ids)
    return [item for block in splitter.feed(data) for item in events.read_block(block)]


def _failed(instance_id: str, message: str, whole: WholeReply, event: bytes | None = None) -> LegError:
    """503 is what an instance says that is too busy or shuts down: it has not died of the request."""
    kind = LegRefused if whole.status == 503 else LegError
    return kind(instance_id, message, reply=whole, event=event)


def _failed_within(instance_id: str, chunk: Chunk, status: int) -> LegError:
    """An instance's own failure in the middle of its stream: its words are kept, for when nobody can go on."""
    payload = sse.data(chunk.block)
    if not chunk.error or payload is None:
        return LegError(instance_id, "The instance aborted the request.")
    whole = WholeReply(status, (("content-type", "application/json"),), payload)
    return _failed(instance_id, f"The instance failed with {status} in its stream.", whole, chunk.block)


def _moved(head: Head) -> wire.Moved | None:
    """A reply that is not streamed says by its status that the request has left."""
    if head.status != 409:
        return None
    return wire.decode_moved_header(head.headers.get(wire.MOVED_HEADER, ""))


def _busy(head: Head) -> wire.Busy | None:
    return wire.decode_busy_header(head.headers.get(wire.BUSY_HEADER, "")) if head.status == wire.BUSY_STATUS else None


def _check_resumed(instance_id: str, resumption: Resumption, head: Head) -> None:
    """The reply must follow on exactly the tokens that we have, or text would be missing or said twice.

    An instance that has lost a migration may still resume from our tokens; one that refuses those is not asked again.
    """
    said = wire.decode_resumed_header(head.headers.get(wire.RESUMED_HEADER, ""))
    if head.status == 410:
        problem = "The instance no longer holds the request."
    elif head.status >= 300:
        raise ResumeFailed(instance_id, f"The instance refused to resume: HTTP {head.status}.")
    elif said != (resumption.resume_id, resumption.output_tokens):
        problem = "The instance would go on from another token than the last one sent."
    else:
        return
    raise ResumeFailed(instance_id, problem, instance_at_fault=resumption.own)
