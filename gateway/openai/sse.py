"""Framing of server-sent events (WHATWG HTML, section 9.2.6): bytes in, whole blocks out, however they were cut."""

from __future__ import annotations

import re

BLOCK_BYTES_MAX = 64 * 1024 * 1024
"""A bound, not a limit to meet: a first event with a long prompt's token ids, or tool arguments, may take megabytes."""

DONE = b"data: [DONE]\n\n"

# A blank line, two line ends in a row, ends a block; one CRLF is never read as two. Written out by first characters,
# for then the search runs over text that has none at five times the speed: an event may be megabytes long.
_BLANK_LINE = re.compile(rb"\r\n(?:\r\n|\n|\r)|\n(?:\r\n|\n|\r)|\r(?:\r\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_BLANK_LINE = 4


class BlockTooLarge(ValueError):
    """An event longer than the bound."""


class BlockSplitter:
    """Cuts a byte stream into blocks. A block keeps its bytes, its blank line included, to be passed on as it is."""

    def __init__(self, bytes_max: int = BLOCK_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max
        self._searched = 0
        self._lf_only = True

    def feed(self, data: bytes) -> list[bytes]:
        """The blocks that ``data`` completes. A blank line that ends in CR waits for the next byte, maybe its LF."""
        if not self._buffer and data.endswith(b"\n\n") and data.count(b"\n\n") == 1 and b"\r" not in data:
            return [data]
        self._buffer += data
        blocks: list[bytes] = []
        begin = 0
        while (found := _BLANK_LINE.search(self._buffer, max(begin, self._searched))) is not None:
            end = found.end()
            if end == len(self._buffer) and self._buffer[-1:] == b"\r":
                break
            blocks.append(bytes(self._buffer[begin:end]))
            begin = self._searched = end
        del self._buffer[:begin]
        self._searched = max(0, len(self._buffer) - _LONGEST_BLANK_LINE)
        if len(self._buffer) > self._bytes_max:
            raise BlockTooLarge(f"an event of more than {self._bytes_max} bytes")
        return blocks

    def is_run(self, data: bytes) -> bool:
        """Whether ``data`` is whole blocks as it stands. Changes nothing."""
        return self._lf_only and not self._buffer and data.endswith(b"\n\n") and b"\r" not in data

    def run(self, data: bytes) -> bytes | None:
        """The blocks that ``data`` completes, in one piece; ``None``, and nothing done, where CR ends lines too."""
        self._lf_only = self._lf_only and b"\r" not in data
        if not self._lf_only:
            return None
        if not self._buffer and data.endswith(b"\n\n"):
            return data
        end = data.rfind(b"\n\n") + 2
        if end == 1 and self._buffer.endswith(b"\n") and data.startswith(b"\n"):
            end = 1
        elif end == 1:
            end = 0
        run = bytes(self._buffer) + data[:end] if end else b""
        if end:
            self._buffer.clear()
            self._searched = 0
        self._buffer += data[end:]
        if len(self._buffer) > self._bytes_max:
            raise BlockTooLarge(f"an event of more than {self._bytes_max} bytes")
        return run

    def rest(self) -> bytes:
        """What is left when the stream has ended: a last block without its blank line, or the stump of one."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


def split(run: bytes) -> list[bytes]:
    """The blocks of a run; what is left of line ends at its end counts as one more."""
    splitter = BlockSplitter(len(run))
    blocks = splitter.feed(run)
    return [*blocks, rest] if (rest := splitter.rest()) else blocks


def lines(block: bytes) -> list[bytes]:
    return [line for line in _LINE_END.split(block) if line]


def data(block: bytes) -> bytes | None:
    """The payload: all ``data`` lines, joined by LF; ``None`` if there is none."""
    if block.startswith(b"data: ") and block.endswith(b"\n\n") and block.count(b"\n") == 2 and b"\r" not in block:
        return block[6:-2]
    values = [line.partition(b":")[2].removeprefix(b" ") for line in lines(block) if line.partition(b":")[0] == b"data"]
    return b"\n".join(values) if values else None


def encode(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
