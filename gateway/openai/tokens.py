"""The events that make up nearly all of a stream, read and changed by the run: one token's text, and nothing else.

One regular expression says what such an event is, to the byte, so that everything else goes the careful way of
events.py, one event at a time. A run takes a tenth of its time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.openai import sse
from gateway.openai.events import StreamItem, read_block

_STRING = rb'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"'
_TOKEN_EVENT = re.compile(
    rb'(data: \{"id":"[^"\\\n]*","object":"(?:chat\.completion\.chunk|text_completion)","created":\d+,'
    rb'"model":"[^"\\\n]*","choices":\[\{"index":0,'
    rb'(?:"delta":\{"(?:content|reasoning)":' + _STRING + rb'\},"logprobs":null,"finish_reason":null,'
    rb'|"text":' + _STRING + rb',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,)'
    rb'"token_ids":\[)(\d{1,10}(?:,\d{1,10})*)(\]\}\]\}\n\n)'
)
_PARTS = 4
"""That splitting by the expression gives for each event: the gap before it, and three groups, the ids in the middle."""


class Tokens(NamedTuple):
    """A run of events with a choice and token ids, and nothing more: no finish, no usage, no error, no role."""

    data: bytes
    """For the client: as it came, or with ``"token_ids":null``, as vLLM sends it when nobody has asked."""
    events: int
    token_ids: list[int]


RunItem = Tokens | StreamItem


def read_tokens(run: bytes, hide_token_ids: bool) -> Tokens | None:
    """``None`` if there is anything else in it."""
    found = _TOKEN_EVENT.match(run)
    if found is None:
        return None
    if found.end() < len(run):
        parts = _TOKEN_EVENT.split(run)
        return None if any(parts[::_PARTS]) else _tokens(parts, hide_token_ids)
    begin, end = found.span(2)
    shown = run[: begin - 1] + b"null" + run[end + 1 :] if hide_token_ids else run
    return Tokens(shown, 1, _integers(run[begin:end]))


def read_run(run: bytes, *, hide_token_ids: bool) -> list[RunItem]:
    """The items in whole blocks whose lines end in LF, in their order."""
    if (tokens := read_tokens(run, hide_token_ids)) is not None:
        return [tokens]
    parts = _TOKEN_EVENT.split(run)
    gaps = parts[::_PARTS]
    if any(gap and not gap.endswith(b"\n\n") for gap in gaps):
        return _read(run)  # What looked like an event began within a block.
    items: list[RunItem] = []
    begin = 0
    for at in range(0, len(parts), _PARTS):
        if gap := parts[at]:
            if at > begin:
                items.append(_tokens(parts[begin:at], hide_token_ids))
            items += _read(gap)
            parts[at], begin = b"", at
    if begin < len(parts) - 1:
        items.append(_tokens(parts[begin:], hide_token_ids))
    return items


def _tokens(parts: list[bytes], hide_token_ids: bool) -> Tokens:
    """Of parts whose gaps are empty."""
    ids = parts[2::_PARTS]
    token_ids = _integers(b",".join(ids))
    if not hide_token_ids:
        return Tokens(b"".join(parts), len(ids), token_ids)
    parts[2::_PARTS] = [b""] * len(ids)
    return Tokens(b"".join(parts).replace(b'"token_ids":[]', b'"token_ids":null'), len(ids), token_ids)


def _integers(text: bytes) -> list[int]:
    return [*map(int, text.split(b","))]


def _read(run: bytes) -> list[RunItem]:
    return [item for block in sse.split(run) for item in read_block(block)]
