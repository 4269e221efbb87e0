"""Whether a reply is what its twin was: the same request's, which ran alone and never moved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LOGPROB_TOLERANCE = 1e-3
"""A token that is computed in a prefill, or in a larger batch, differs from one that is decoded alone in the last
digits of a float; one from a wrong KV block differs in the first."""


@dataclass(slots=True)
class Heard:
    """What a client got for one request, in the order in which it came."""

    status: int | None = None
    request_id: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    """How often ``[DONE]`` came."""
    after_done: int = 0
    """Events that came after it."""
    strange: list[str] = field(default_factory=list)
    """Lines that are no event."""
    whole: Any = None
    """The answer of a request that is not streamed, or the body of a refusal."""
    broken: str = ""
    """How the connection failed, if it did."""
    left: bool = False
    """The client went away by itself."""

    def take_line(self, line: str) -> None:
        if not line:
            return
        if line == "data: [DONE]":
            self.done += 1
        elif line.startswith("data: {"):
            self.after_done += self.done > 0
            self.events.append(json.loads(line.removeprefix("data: ")))
        else:
            self.strange.append(line)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if event.get("error")]

    def tokens_total(self) -> int:
        return sum(len(choice.tokens) for choice in assemble(self.events).values())


@dataclass(slots=True)
class Choice:
    """One sequence of a stream, put together as a client does."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    roles: list[str] = field(default_factory=list)
    finishes: list[tuple[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, float]] = field(default_factory=list)
    """For each token of the output, what was said of it: its own and the likeliest ones, by their text."""
    logprob_tokens: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Tool calls by index; ``ids`` holds all that were given."""


def assemble(events: Sequence[dict[str, Any]]) -> dict[int, Choice]:
    choices: dict[int, Choice] = {}
    for event in events:
        for part in event.get("choices") or []:
            _add(choices.setdefault(part["index"], Choice()), part)
    return choices


def _add(choice: Choice, part: dict[str, Any]) -> None:
    delta = part.get("delta") or {}
    choice.tokens += part.get("token_ids") or []
    choice.text += part["text"] if "text" in part else delta.get("content") or ""
    choice.reasoning += delta.get("reasoning") or ""
    choice.roles += [delta["role"]] if delta.get("role") else []
    if part.get("finish_reason"):
        choice.finishes.append((part["finish_reason"], part.get("stop_reason")))
    names, logprobs = read_logprobs(part.get("logprobs"))
    choice.logprob_tokens += names
    choice.logprobs += logprobs
    for piece in delta.get("tool_calls") or []:
        call = choice.calls.setdefault(piece["index"], {"name": "", "arguments": "", "ids": []})
        function = piece.get("function") or {}
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""
        call["ids"] += [piece["id"]] if piece.get("id") else []


def read_logprobs(logprobs: dict[str, Any] | None) -> tuple[list[str], list[dict[str, float]]]:
    """The tokens, and what was said of each, of a chat's or a completion's ``logprobs``."""
    if not logprobs:
        return [], []
    if "content" in logprobs:
        entries = logprobs["content"] or []
        said = [
            {one["token"]: one["logprob"] for one in [*(entry.get("top_logprobs") or []), entry]} for entry in entries
        ]
        return [entry["token"] for entry in entries], said
    tokens = logprobs["tokens"]
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    own = logprobs["token_logprobs"]
    # A prompt's first token has no logprob.
    return tokens, [
        {**(top or {}), **({token: value} if value is not None else {})}
        for token, value, top in zip(tokens, own, tops, strict=True)
    ]


def stream_differences(twin: Heard, heard: Heard) -> list[str]:
    """Empty: this client has got what the twin's got; one that left, as far as it listened."""
    found = _not_a_stream(heard)
    if heard.errors:
        found.append(f"{len(heard.errors)} error events: {_short(heard.errors[0].get('message'))}")
    elif not heard.left:
        found += _not_complete(twin, heard)
    return found + _choice_differences(twin, heard, partial=heard.left or bool(heard.errors))


def honest_error_differences(twin: Heard, heard: Heard) -> list[str]:
    """Of a stream that could not go on: right as far as it went, then exactly one error event, then nothing."""
    found = _not_a_stream(heard)
    if len(heard.errors) != 1:
        found.append(f"{len(heard.errors)} error events")
    elif not heard.events[-1].get("error"):
        found.append("events follow the error")
    if heard.done:
        found.append("[DONE] after an error")
    return found + _choice_differences(twin, heard, partial=True)


def whole_differences(twin: Heard, heard: Heard) -> list[str]:
    """The same JSON but for ids, the time, and the last digits of logprobs."""
    if heard.broken:
        return [f"the connection broke: {heard.broken}"]
    if heard.status != 200 or not isinstance(heard.whole, dict):
        return [f"status {heard.status}: {_short(heard.whole)}"]
    found: list[str] = []
    _compare(_anonymous(twin.whole), _anonymous(heard.whole), "reply", found)
    for index, choice in enumerate(heard.whole.get("choices") or []):
        ids = [call.get("id") for call in (choice.get("message") or {}).get("tool_calls") or []]
        if len(set(ids)) != len(ids) or not all(ids):
            found.append(f"choice {index}: tool call ids {ids}")
    return found


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The index where two sequences part, which may be the end of one; ``None`` where they are equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _not_a_stream(heard: Heard) -> list[str]:
    if heard.status != 200:
        return [f"status {heard.status}: {_short(heard.whole or heard.broken)}"]
    found = []
    if heard.broken:
        found.append(f"the connection broke: {heard.broken}")
    if heard.strange:
        found.append(f"lines that are no event: {_short(heard.strange)}")
    if heard.after_done:
        found.append(f"{heard.after_done} events after [DONE]")
    named = [event for event in heard.events if not event.get("error")]
    identities = {tuple(event.get(name) for name in ("id", "created", "model", "object")) for event in named}
    if len(identities) > 1:
        found.append(f"{len(identities)} identities in one stream: {_short(sorted(map(str, identities)))}")
    return found


def _not_complete(twin: Heard, heard: Heard) -> list[str]:
    found = []
    if heard.done != 1:
        found.append(f"{heard.done} times [DONE]")
    usage, expected = ([event["usage"] for event in one.events if event.get("usage")] for one in (heard, twin))
    if usage[-1:] != expected[-1:]:
        found.append(f"usage {usage[-1:]}, not {expected[-1:]}")
    totals = [
        sum(bool(event.get("usage")) and not event.get("choices") for event in one.events) for one in (heard, twin)
    ]
    if totals[0] != totals[1]:
        found.append(f"{totals[0]} events of usage alone, not {totals[1]}")
    return found


def _choice_differences(twin: Heard, heard: Heard, *, partial: bool) -> list[str]:
    """``partial``: the reply need not be complete, but what there is must be right."""
    expected, actual = assemble(twin.events), assemble(heard.events)
    found = []
    if not partial and set(expected) != set(actual):
        found.append(f"choices {sorted(actual)}, not {sorted(expected)}")
    for index in sorted(set(expected) & set(actual)):
        where = f"choice {index}: " if len(expected) > 1 else ""
        found += [where + difference for difference in _differences(expected[index], actual[index], partial=partial)]
        counts = [event["usage"]["completion_tokens"] for event in heard.events if event.get("usage")]
        if len(expected) == 1 and counts != sorted(counts):
            found.append("usage goes back")
    return found


def _differences(expected: Choice, actual: Choice, *, partial: bool) -> list[str]:
    found = []
    for name in ("tokens", "logprob_tokens"):
        wanted, got = getattr(expected, name), getattr(actual, name)
        at = first_difference(wanted, got)
        if at is not None and not (partial and at == len(got)):
            found.append(
                f"{name} differ from number {at} on ({len(wanted)} expected, {len(got)} came): "
                f"{_short(wanted[at : at + 3])}, {_short(got[at : at + 3])}"
            )
    for name in ("text", "reasoning"):
        wanted, got = getattr(expected, name), getattr(actual, name)
        at = first_difference(wanted, got)
        if at is not None and not (partial and at == len(got)):
            found.append(f"{name} differs from character {at} on: {_short(wanted[at:])}, {_short(got[at:])}")
    found += _call_differences(expected, actual, partial=partial)
    if not partial or actual.finishes:
        if actual.finishes != expected.finishes:
            found.append(f"finishes {actual.finishes}, not {expected.finishes}")
        if actual.roles != expected.roles:
            found.append(f"roles {actual.roles}, not {expected.roles}")
    largest = largest_logprob_difference(expected, actual)
    if largest > LOGPROB_TOLERANCE:
        found.append(f"logprobs differ by up to {largest:.3g}")
    return found


def _call_differences(expected: Choice, actual: Choice, *, partial: bool) -> list[str]:
    found = []
    for index, call in actual.calls.items():
        if len(call["ids"]) != 1:
            found.append(f"tool call {index} has {len(call['ids'])} ids")
    ids = [call["ids"][0] for call in actual.calls.values() if call["ids"]]
    if len(set(ids)) != len(ids):
        found.append("two tool calls share an id")
    for index in sorted(set(expected.calls) | set(actual.calls)):
        wanted, got = (one.calls.get(index) for one in (expected, actual))
        if wanted is None or got is None:
            if wanted is None or not partial:
                found.append(f"tool call {index}: {_short(got)}, not {_short(wanted)}")
            continue
        same = got["arguments"] == wanted["arguments"] or (partial and wanted["arguments"].startswith(got["arguments"]))
        if got["name"] != wanted["name"] or not same:
            found.append(f"tool call {index}: {_short(got)}, not {_short(wanted)}")
    return found


def largest_logprob_difference(expected: Choice, actual: Choice) -> float:
    """Over the tokens that both have. Where two likely tokens change places, each is measured against the other."""
    return max(map(_logprob_difference, expected.logprobs, actual.logprobs), default=0.0)


def _logprob_difference(expected: dict[str, float], actual: dict[str, float]) -> float:
    shared = [abs(value - actual[token]) for token, value in expected.items() if token in actual]
    lowest = [abs(min(one.values()) - min(other.values())) for one, other in ((expected, actual),) if one and other]
    missing = float("inf") if bool(expected) != bool(actual) else 0.0
    return max([*shared, *lowest, missing])


def _anonymous(whole: dict[str, Any]) -> dict[str, Any]:
    """Without what is new in every reply."""
    anonymous = {name: value for name, value in whole.items() if name not in ("id", "created")}
    anonymous["choices"] = [_without_call_ids(choice) for choice in whole.get("choices") or []]
    return anonymous


def _without_call_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if not message or not message.get("tool_calls"):
        return choice
    calls = [{**call, "id": None} for call in message["tool_calls"]]
    return {**choice, "message": {**message, "tool_calls": calls}}


def _compare(expected: Any, actual: Any, where: str, found: list[str]) -> None:
    if isinstance(expected, float) and isinstance(actual, int | float):
        if abs(expected - actual) > LOGPROB_TOLERANCE:
            found.append(f"{where}: {actual}, not {expected}")
    elif isinstance(expected, dict) and isinstance(actual, dict):
        for name in sorted(set(expected) | set(actual), key=str):
            if name not in expected or name not in actual:
                found.append(f"{where}.{name} is only in {'the twin' if name in expected else 'the reply'}")
            else:
                _compare(expected[name], actual[name], f"{where}.{name}", found)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            found.append(f"{where}: {len(actual)} entries, not {len(expected)}")
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            if len(found) < 5:
                _compare(one, other, f"{where}[{index}]", found)
    elif expected != actual:
        at = first_difference(expected, actual) if isinstance(expected, str) and isinstance(actual, str) else 0
        if at:
            found.append(f"{where} differs from character {at} on: {_short(expected[at:])}, {_short(actual[at:])}")
        else:
            found.append(f"{where}: {_short(actual)}, not {_short(expected)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"
