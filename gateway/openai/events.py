"""What the gateway reads from an event of a stream, and the few bytes that it changes in it.

All by searching bytes: within JSON text a quote is always escaped, so a bare ``"token_ids":`` is never part of one.
Nothing is decoded and encoded again, so what is not changed stays as the instance wrote it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from gateway import wire
from gateway.openai import sse

_TOKEN_IDS = re.compile(rb'"token_ids"\s*:\s*(\[[\d\s,]*\])')
_HIDDEN_IDS = re.compile(rb'("(?:prompt_)?token_ids"\s*:\s*)\[[\d\s,]*\]')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
_ERROR = re.compile(rb'\s*\{\s*"error"\s*:\s*[{"]')
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')
_CREATED = re.compile(rb'"created"\s*:\s*(\d+)')
_ROLE_DELTA = re.compile(rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"[^"]*"\s*(?:,\s*"content"\s*:\s*(?:""|null)\s*)?\}')
_TRANSFER = re.compile(rb'"(?:kv|ec)_transfer_params"\s*:\s*(?=\{)')
_STRING_OR_BRACE = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}]')
_EMPTY_DELTA = re.compile(rb'"delta"\s*:\s*\{\s*\}\s*,\s*"logprobs"\s*:\s*null\s*,\s*"finish_reason"\s*:\s*null')


@dataclass(frozen=True, slots=True)
class Done:
    """``data: [DONE]``."""

    block: bytes


@dataclass(frozen=True, slots=True)
class Other:
    """Anything that says nothing about the request, such as a keep-alive comment."""

    block: bytes


class MalformedEvent(ValueError):
    """An instance sent what no vLLM sends."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An event of the reply. ``token_ids`` is ``None`` where the instance did not tell them."""

    block: bytes
    has_choice: bool
    role: bool
    """A chat's opening event: it stands for no token."""
    token_ids: list[int] | None
    finished: bool
    usage: bool
    error: bool
    failure: int | None
    """HTTP status of a failure that is the instance's own: see :func:`failure`."""
    empty: bool
    """A delta with nothing in it, which exists only because the gateway asked for token ids."""


StreamItem = wire.StreamComment | Done | Other | Chunk


def read_block(block: bytes) -> list[StreamItem]:
    """The items in a block: as a rule one. Our own comments never stay in a block that is passed on."""
    if wire.COMMENT_PREFIX not in block:
        return [_read_event(block)]
    items: list[StreamItem] = []
    kept: list[bytes] = []
    for line in sse.lines(block):
        if not line.startswith(wire.COMMENT_PREFIX):
            kept.append(line)
        elif (comment := wire.decode_comment(line)) is not None:
            items.append(comment)
    if len(items) == 0 and len(kept) == len(sse.lines(block)):
        return [_read_event(block)]
    return [*items, _read_event(b"\n".join(kept) + b"\n\n")] if kept else items


def _read_event(block: bytes) -> Done | Other | Chunk:
    payload = sse.data(block)
    if payload is None:
        return Other(block)
    if payload == b"[DONE]":
        return Done(block)
    ids = _TOKEN_IDS.search(payload)
    finished, error = _FINISH.search(payload) is not None, _ERROR.match(payload) is not None
    return Chunk(
        block=block,
        has_choice=_CHOICE.search(payload) is not None,
        role=_ROLE_DELTA.search(payload) is not None,
        token_ids=None if ids is None else _integers(ids[1]),
        finished=finished,
        usage=_USAGE.search(payload) is not None,
        error=error,
        failure=failure(payload) if finished or error else None,
        empty=_EMPTY_DELTA.search(payload) is not None,
    )


def _integers(text: bytes) -> list[int]:
    try:
        ids: list[int] = json.loads(text)
    except ValueError as error:
        raise MalformedEvent("an event whose token ids cannot be read") from error
    return ids


def failure(payload: bytes) -> int | None:
    """The status of an instance's own failure in a reply that began well; ``None`` if it says none.

    An error of the 5xx class, as vLLM sends when its engine dies; or a finish that says aborted, as a server that
    shuts down does. The gateway's only way to abort is to close the connection, so nobody has asked for that one.
    """
    if _ABORTED.search(payload) is not None:
        return 502
    if _ERROR.match(payload) is None:
        return None
    try:
        status = int(json.loads(payload)["error"]["code"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return status if 500 <= status <= 599 else None


def hide_token_ids(block: bytes) -> bytes:
    """As vLLM sends the event when nobody has asked for token ids: the field is there, and null."""
    return _HIDDEN_IDS.sub(rb"\1null", block)


def hide_transfers(data: bytes) -> bytes:
    """An event or a whole reply without what a KV connector says in it: hosts, ports, engine and block ids."""
    if b"_transfer_params" not in data or (found := _TRANSFER.search(data)) is None:
        return data
    end, depth = len(data), 0
    for token in _STRING_OR_BRACE.finditer(data, found.end()):
        depth += (token[0] == b"{") - (token[0] == b"}")
        if depth == 0:
            end = token.end()
            break
    return data[: found.end()] + b"null" + hide_transfers(data[end:])


def completion_tokens(body: bytes) -> int:
    """What a whole reply says in its usage; 0 if it says nothing."""
    found = _COMPLETION_TOKENS.search(body, max(body.rfind(b'"usage"'), 0))
    return 0 if found is None else int(found[1])


def created(block: bytes) -> bytes | None:
    found = _CREATED.search(block)
    return None if found is None else found[1]


def with_created(block: bytes, value: bytes) -> bytes:
    """The event with the first leg's time of creation, so that one reply has one."""
    found = _CREATED.search(block)
    if found is None or found[1] == value:
        return block
    return block[: found.start(1)] + value + block[found.end(1) :]


def with_created_everywhere(run: bytes, value: bytes) -> bytes:
    """The same for several events of one leg."""
    return _CREATED.sub(rb'"created":' + value, run)


def completed(rest: bytes) -> bytes | None:
    """A last event whose blank line did not come, completed; ``None`` for the stump of one."""
    payload = sse.data(rest)
    if payload is None:
        return None
    if payload != b"[DONE]":
        try:
            json.loads(payload)
        except (ValueError, RecursionError):
            return None
    return rest.rstrip(b"\r\n") + b"\n\n"
