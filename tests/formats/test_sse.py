"""Framing: however the bytes are cut."""

from __future__ import annotations

import pytest

from gateway.openai import sse

STREAMS = [
    b'data: {"a":"x"}\n\ndata: [DONE]\n\n',
    b"data: 1\r\n\r\n: ping\r\n\r\ndata: 2\r\n\r\n",
    b"data: 1\r\rdata: 2\r\r",
    b"event: error\nid: 7\nretry: 5\ndata:no space\ndata: second line\n\n",
    b"\n\ndata: 1\n\n\n\ndata: 2\n\n",
    'data: {"text":"你好 👩‍👩‍👧 naïve"}\n\ndata: {"text":"\\"data: x\\n\\n\\""}\n\n'.encode(),
    b"data: 1\r\n\n\rdata: 2\n\r\n",
]


def split(parts: list[bytes]) -> list[bytes]:
    splitter = sse.BlockSplitter()
    blocks = [block for part in parts for block in splitter.feed(part)]
    rest = splitter.rest()
    return [*blocks, rest] if rest else blocks


@pytest.mark.parametrize("stream", STREAMS)
def test_blocks_are_the_same_however_the_bytes_are_cut(stream: bytes) -> None:
    whole = split([stream])
    assert b"".join(whole) == stream
    assert split([bytes([byte]) for byte in stream]) == whole
    for at in range(len(stream)):
        assert split([stream[:at], stream[at:]]) == whole, at


@pytest.mark.parametrize("stream", STREAMS[:4])
def test_each_block_holds_one_event(stream: bytes) -> None:
    assert all(sse.data(block) is not None or block.startswith(b":") for block in split([stream]))


def test_a_carriage_return_at_the_end_waits_for_its_line_feed() -> None:
    splitter = sse.BlockSplitter()
    assert splitter.feed(b"data: 1\r\n\r") == []
    assert splitter.feed(b"\n") == [b"data: 1\r\n\r\n"]


def test_data_joins_its_lines_and_drops_one_space() -> None:
    assert sse.data(b"data: a\ndata:  b\ndata:c\n\n") == b"a\n b\nc"
    assert sse.data(b"data: a\r\n\r\n") == b"a"
    assert sse.data(b": data: a\n\n") is None
    assert sse.data(b"datax: a\n\n") is None
    assert sse.data(b"data\n\n") == b""


def test_an_event_over_the_bound_is_refused_and_one_under_it_is_not() -> None:
    splitter = sse.BlockSplitter(bytes_max=100)
    assert splitter.feed(b"data: " + b"x" * 94) == []
    with pytest.raises(sse.BlockTooLarge):
        splitter.feed(b"x")
    assert sse.BLOCK_BYTES_MAX > 4 * 8 * 1024 * 1024


def test_what_is_left_at_the_end_is_told() -> None:
    splitter = sse.BlockSplitter()
    assert splitter.feed(b"data: 1\n\ndata: 2") == [b"data: 1\n\n"]
    assert splitter.rest() == b"data: 2"
    assert splitter.rest() == b""
