"""What holds for every body and for every cut of a stream, tried on random ones (hypothesis prints what fails)."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from gateway.errors import BadRequest
from gateway.openai import events, sse
from gateway.openai.body import DROPPED, DROPPED_IN_FORWARDS, FORBIDDEN, read_body, read_forward_body

LEAVES = some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20)
VALUES = some.recursive(
    LEAVES,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
NAMES = some.sampled_from(["messages", "prompt", "seed", "stream_options", "priority", "tools", "n"]) | some.text(
    max_size=8
)
FIELDS = some.dictionaries(NAMES.filter(lambda name: name not in ("vllm_xargs", "extra_body")), VALUES, max_size=8)
LINES = some.sampled_from(["data: ", "data:", ": ", "event: ", "id: ", "retry: ", "other: ", ""])
ENDS = some.sampled_from(["\n", "\r\n", "\r"])


def written(fields: dict[str, Any], indent: int | None) -> bytes:
    return json.dumps(fields, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")


@given(FIELDS, some.sampled_from([None, 0, 3]), some.booleans())
def test_every_value_reaches_the_instance(fields: dict[str, Any], indent: int | None, stream: bool) -> None:
    fields = {name: value for name, value in fields.items() if name not in FORBIDDEN} | {"stream": stream}
    with contextlib.suppress(BadRequest):  # Text that is no Unicode.
        sent = written(fields, indent)
        added = {"return_token_ids": True} if stream else {}
        expected = {name: value for name, value in fields.items() if name not in DROPPED} | added
        assert repr(json.loads(read_body(sent).upstream)) == repr(expected)
        forwarded = read_forward_body(sent)
        expected = {name: value for name, value in fields.items() if name not in DROPPED_IN_FORWARDS}
        assert repr(json.loads(forwarded.upstream)) == repr(expected)
        assert forwarded.upstream == sent or set(fields) & DROPPED_IN_FORWARDS


@given(FIELDS, some.sampled_from(FORBIDDEN), VALUES, some.lists(some.sampled_from(["vllm_xargs", "extra_body"])))
def test_what_steers_the_engine_is_found_wherever_it_stands(
    fields: dict[str, Any], name: str, value: Any, nesting: list[str]
) -> None:
    aimed: dict[str, Any] = {name: value}
    for outer in nesting[:20]:
        aimed = {outer: aimed}
    sent = written(fields | aimed, None)
    for read in (read_body, read_forward_body):
        try:
            read(sent)
        except BadRequest:
            continue
        raise AssertionError(f"{read.__name__} has let it through")


@given(some.binary(max_size=200) | some.text(alphabet='{}[]",:\\ 0e-tfnu', max_size=60).map(str.encode))
def test_no_bytes_are_more_than_a_bad_request(body: bytes) -> None:
    for read in (read_body, read_forward_body):
        with contextlib.suppress(BadRequest):
            read(body)


@given(some.lists(some.tuples(LINES, some.text(max_size=12), ENDS), max_size=20), some.lists(some.integers(0, 300)))
def test_blocks_are_the_same_however_a_stream_is_cut(lines: list[tuple[str, str, str]], at: list[int]) -> None:
    stream = "".join(part for line in lines for part in line).encode("utf-8", "surrogatepass")
    places = sorted({0, len(stream), *(place for place in at if place < len(stream))})
    whole = sse.BlockSplitter()
    expected = [block for block in (*whole.feed(stream), whole.rest()) if block]
    assert b"".join(expected) == stream
    for parts in (
        [stream[begin:end] for begin, end in itertools.pairwise(places)],
        [bytes([byte]) for byte in stream],
    ):
        cut = sse.BlockSplitter()
        blocks = [*(block for part in parts for block in cut.feed(part)), cut.rest()]
        assert [block for block in blocks if block] == expected


@given(VALUES, some.lists(some.integers(0, 200_000), max_size=5))
def test_of_an_event_only_what_we_asked_for_is_taken_out(value: Any, ids: list[int]) -> None:
    quoted = json.dumps(f'"token_ids":{ids},"kv_transfer_params":{{}}')
    event = b'data: {"x":%s,"text":%s,"choices":[{"token_ids":%s}]}\n\n'
    fields = json.dumps(json.dumps(value)).encode(), quoted.encode()
    assert events.hide_token_ids(event % (*fields, json.dumps(ids).encode())) == event % (*fields, b"null")
    plain = event % (*fields, b"null")
    assert events.hide_transfers(plain) == events.hide_token_ids(plain) == plain


@given(VALUES)
def test_what_a_kv_connector_says_is_taken_out_whole(value: Any) -> None:
    said = b'{"a":%s,"kv_transfer_params":%s,"b":1}'
    text = json.dumps(json.dumps(value)).encode()
    inner = json.dumps({"remote": value}).encode()
    assert events.hide_transfers(said % (text, inner)) == said % (text, b"null")
