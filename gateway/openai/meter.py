"""How many tokens a request has taken, as far as its reply tells."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.openai.terms import Estimate

_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*\[\s*(\d[\d\s,]*)\]')
_USAGE = rb'"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*?'
_TOTAL = re.compile(_USAGE + rb'"total_tokens"\s*:\s*(\d{1,15})')
_INPUT_OUTPUT = re.compile(
    _USAGE + rb'"input_tokens"\s*:\s*(\d{1,15})(?:[^{}]|\{[^{}]*\})*?"output_tokens"\s*:\s*(\d{1,15})'
)
EVENTS_WITH_PROMPT = 4
"""An instance tells the prompt's token ids in its first event or in the one after the role."""


@dataclass(slots=True)
class Meter:
    """The first of these that is known counts: the reply's own ``usage``; the token ids of a stream; the estimate."""

    total_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    refused: bool = False
    """Nothing was computed for it."""
    _events: int = 0

    def event(self, block: bytes, tokens: int, *, usage: bool) -> None:
        """One event of a stream; ``usage``: it is the one that says what the whole request took."""
        self._events += 1
        self.output_tokens += tokens
        if self.prompt_tokens is None and self._events <= EVENTS_WITH_PROMPT:
            found = _PROMPT_IDS.search(block)
            self.prompt_tokens = None if found is None else found[1].count(b",") + 1
        if usage:
            self.total_tokens = _total(block)

    def generated(self, events: int, tokens: int) -> None:
        """Events that say tokens, and nothing else."""
        self._events += events
        self.output_tokens += tokens

    def passed(self, data: bytes, events: int) -> None:
        """Events of a stream that is passed on unread: no more than a token each, unless they say what it took."""
        self.generated(events, events)
        if b'"usage"' not in data:
            return
        if totals := _TOTAL.findall(data):
            self.total_tokens = int(totals[-1])
        elif pairs := _INPUT_OUTPUT.findall(data):
            self.prompt_tokens, output_tokens = map(int, pairs[-1])
            if output_tokens:  # Anthropic's first event has 0.
                self.total_tokens = self.prompt_tokens + output_tokens

    def restart(self) -> None:
        """What a lost leg had generated before anything reached the client."""
        self.output_tokens = self._events = 0

    def whole(self, status: int, body: bytes) -> None:
        self.refused = status >= 400
        self.total_tokens = _total(body)

    def tokens(self, estimate: Estimate) -> int:
        if self.refused:
            return 0
        if self.total_tokens is not None:
            return self.total_tokens
        if self._events == 0:
            return estimate.total
        return (estimate.prompt if self.prompt_tokens is None else self.prompt_tokens) + self.output_tokens


def _total(data: bytes) -> int | None:
    """By searching bytes, as in events.py: a bare ``"usage":{`` cannot be part of a text."""
    if (found := _TOTAL.search(data)) is not None:
        return int(found[1])
    found = _INPUT_OUTPUT.search(data)
    return None if found is None else int(found[1]) + int(found[2])
