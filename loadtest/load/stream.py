"""One stream, read to its end: when its tokens came, and what was wrong with it. No sockets and no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"[DONE]"
CODE_LENGTH_MAX = 60
"""Of what a server says is wrong: it becomes a row of the report."""


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    text: str | None = None
    delta: dict[str, Any] | None = None

    @property
    def has_output(self) -> bool:
        if self.text is not None:
            return bool(self.text)
        return any(value for name, value in (self.delta or {}).items() if name != "role")


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Reading:
    """``take`` each event with the time it came at; then ``verdict``."""

    asked_at: float
    tokens_asked: int
    first_at: float | None = None
    last_at: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between two events with output: a token each, as vLLM sends them, unless it was behind."""
    tokens: int | None = None
    """As its usage says."""
    bytes_read: int = 0
    finishes: int = 0
    is_done: bool = False
    wrong: str | None = None
    """The first thing that was."""

    def take(self, block: bytes, now: float) -> None:
        """What stands between two empty lines."""
        self.bytes_read += len(block)
        for line in block.splitlines():
            if line.startswith(b"data:"):
                self._data(line[5:].strip(), now)
            elif line and not line.startswith(b":"):
                self._fail("not an event")

    def _data(self, data: bytes, now: float) -> None:
        if self.is_done:
            self._fail("events after [DONE]")
        if data == DONE:
            self.is_done = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError:
            self._fail("not an event")
            return
        if event.error is not None:
            self._fail(f"error event: {code_of(event.error)}")
        if event.usage is not None:
            self.tokens = event.usage.completion_tokens
        for choice in event.choices:
            if self.finishes and (choice.has_output or choice.finish_reason):
                self._fail("output after the finish")
            if choice.has_output:
                self._output(now)
            if choice.finish_reason is not None:
                self.finishes += 1

    def _output(self, now: float) -> None:
        if self.last_at is None:
            self.first_at = now
        else:
            self.gaps_s.append(now - self.last_at)
        self.last_at = now

    def cut(self, reason: str) -> None:
        """The connection ended, or something that is no HTTP came."""
        self._fail(f"cut: {reason}")

    def _fail(self, what: str) -> None:
        if self.wrong is None:
            self.wrong = what

    def verdict(self) -> str | None:
        """``None``: whole. One that is cut cleanly is broken too: no finish, no [DONE], or too few tokens."""
        if self.wrong is not None:
            return self.wrong
        if self.finishes == 0:
            return "no finish"
        if not self.is_done:
            return "no [DONE]"
        if self.tokens is None:
            return "no usage"
        if self.tokens != self.tokens_asked:
            return "short read" if self.tokens < self.tokens_asked else "too many tokens"
        return None


def code_of(error: Any) -> str:
    """Of an error body's ``error``: the words that a row of the report can be."""
    if not isinstance(error, dict):
        return "unknown"
    return str(error.get("code") or error.get("type") or "unknown")[:CODE_LENGTH_MAX]


def refusal(status: int, body: bytes) -> str:
    """Of a reply that is no stream."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"HTTP {status}"
    return f"HTTP {status}: {code_of(error)}"
