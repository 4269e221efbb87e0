"""The few fields of a request body that the gateway reads, and the fewer that it changes.

The body is taken apart into its top-level members and put together again from their own bytes, so every value reaches
the instance as the client wrote it: integers of any size, floats, nulls, repeated keys.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from gateway.errors import BadRequest
from gateway.openai.caps import is_true
from gateway.openai.terms import Asked, Terms, read_asked

FORBIDDEN = ("kv_transfer_params", "ec_transfer_params", "kv_hints")
"""They would steer the engine's own connections."""
DROPPED = frozenset({"priority"})
"""A client's own is never let through: the class of the request says what the instance is told."""
DROPPED_IN_FORWARDS = DROPPED | {"request_id"}
"""There it would become the engine's id, where for chats and completions the header comes first."""
OWN_XARGS_PREFIX = "kvferry_"
MODEL_LENGTH_MAX = 1024

_NESTING = ("vllm_xargs", "extra_body")
"""Objects of more fields: vLLM makes no difference between the first's names and its own."""

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_ANY = Terms()


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """``upstream`` is what every leg is sent. ``resumable``: its output is one sequence that can go on elsewhere."""

    upstream: bytes
    model: str | None
    stream: bool
    wants_token_ids: bool
    wants_usage: bool
    resumable: bool
    hides_reasoning: bool
    """A server with a reasoning parser then shows no token ids, and no event at all while the model reasons."""
    asked: Asked


@dataclass(frozen=True, slots=True)
class ForwardBody:
    """Of a request that is passed on. ``upstream`` is what the client sent, less the gateway's own fields if any."""

    upstream: bytes
    model: str | None
    stream: bool
    previous_response_id: str | None
    stores: bool
    """Its instance may keep what it answers."""
    repeatable: bool
    """Nothing is changed by doing it twice: no background work, no tool that the server calls itself."""
    asked: Asked


def read_forward_body(raw: bytes, terms: Terms = _ANY, *, takes_priority: bool = True) -> ForwardBody:
    """Raises :class:`BadRequest` like :func:`read_body`. ``takes_priority``: the instance reads it from the body."""
    members = _parse(raw)
    fields = {key: value for key, value, _ in members}
    _refuse_own_fields(members)
    asked = read_asked(fields, len(raw), terms)
    kept = [source for key, _, source in members if key not in DROPPED_IN_FORWARDS]
    if asked.priority is not None and takes_priority:
        kept.append(f'"priority":{asked.priority}')
    previous = fields.get("previous_response_id")
    return ForwardBody(
        upstream=raw if kept == [source for _, _, source in members] else ("{" + ",".join(kept) + "}").encode(),
        model=_model(fields.get("model")),
        stream=is_true(fields.get("stream")),
        previous_response_id=previous if isinstance(previous, str) and previous else None,
        stores=fields.get("store", True) is not False,
        repeatable=not is_true(fields.get("background")) and not _calls_tools_itself(fields.get("tools")),
        asked=asked,
    )


def is_true_text(value: bytes) -> bool:
    return is_true(value.decode("latin-1"))


def check_form_field(name: str, value: bytes) -> None:
    """The rules of :func:`read_body` for a field of a form. Raises :class:`BadRequest`."""
    key = name.partition("[")[0]
    if key in FORBIDDEN or key.startswith(OWN_XARGS_PREFIX):
        raise BadRequest(f"`{key}` cannot be set through this gateway.", param=key)
    if key in _NESTING:
        inner = name[len(key) :].strip("[]")
        if inner in FORBIDDEN or inner.startswith(OWN_XARGS_PREFIX):
            raise BadRequest(f"`{key}.{inner}` cannot be set through this gateway.", param=key)
        if value.strip().startswith(b"{"):
            _refuse_own_fields([(key, {one: inside for one, inside, _ in _parse(value)}, "")])


def read_model_field(value: bytes) -> str | None:
    """The model of a form. Raises :class:`BadRequest`."""
    try:
        return _model(value.decode())
    except UnicodeDecodeError as error:
        raise BadRequest("`model` is not valid UTF-8.", param="model") from error


def read_body(raw: bytes, terms: Terms = _ANY) -> GenerateBody:
    """Raises :class:`BadRequest` for what is not a JSON object, for fields that are the gateway's own, and for what
    goes beyond the terms.
    """
    members = _parse(raw)
    fields = {key: value for key, value, _ in members}
    _refuse_own_fields(members)
    model = _model(fields.get("model"))
    asked = read_asked(fields, len(raw), terms)
    stream = is_true(fields.get("stream"))
    # A value that we do not know is left for the instance to judge.
    adds_token_ids = stream and fields.get("return_token_ids") in (None, False)
    return GenerateBody(
        upstream=_upstream(members, adds_token_ids, asked.priority),
        model=model,
        stream=stream,
        wants_token_ids=not adds_token_ids,
        wants_usage=_wants_usage(fields.get("stream_options")),
        resumable=_is_one_sequence(fields),
        hides_reasoning="include_reasoning" in fields and not is_true(fields["include_reasoning"]),
        asked=asked,
    )


def _parse(raw: bytes) -> list[tuple[str, Any, str]]:
    """The members as (key, value, source text)."""
    if not raw.strip():
        raise BadRequest("The request body is empty; a JSON object was expected.")
    try:
        return _members(raw.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"The request body is not UTF-8: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"The request body is not valid JSON: {error.msg} at character {error.pos}.") from error
    except RecursionError as error:
        raise BadRequest("The request body is nested too deeply.") from error
    except ValueError as error:  # An integer of more digits than Python converts.
        raise BadRequest(f"The request body cannot be read: {error}.") from error


def _members(text: str) -> list[tuple[str, Any, str]]:
    at = _skip(text, 0)
    if text[at] != "{":
        _DECODER.decode(text)
        raise BadRequest("The request body must be a JSON object.")
    members: list[tuple[str, Any, str]] = []
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        _expect_end(text, at + 1)
        return members
    while True:
        begin = at
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = scanstring(text, at + 1, True)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        value, at = _DECODER.raw_decode(text, _skip(text, at + 1))
        members.append((key, value, text[begin:at]))
        at = _skip(text, at)
        match text[at : at + 1]:
            case ",":
                at = _skip(text, at + 1)
            case "}":
                _expect_end(text, at + 1)
                return members
            case _:
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)


def _skip(text: str, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    assert found is not None
    return found.end()


def _expect_end(text: str, at: int) -> None:
    at = _skip(text, at)
    if at != len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _refuse_own_fields(members: list[tuple[str, Any, str]]) -> None:
    for key, value, _ in members:
        if key in FORBIDDEN:
            raise BadRequest(f"`{key}` cannot be set through this gateway.", param=key)
        if key in _NESTING:
            _refuse_within(key, value)


def _refuse_within(key: str, value: Any) -> None:
    """Whatever stands for more fields, and what stands for more in those."""
    while isinstance(value, dict):
        for name in value:
            if name in FORBIDDEN or name.startswith(OWN_XARGS_PREFIX):
                raise BadRequest(f"`{key}.{name}` cannot be set through this gateway.", param=key)
        inner = [value[name] for name in _NESTING if name in value]
        for one in inner[1:]:
            _refuse_within(key, one)
        value = inner[0] if inner else None


def _model(value: Any) -> str | None:
    """The name goes into logs, records and messages: one that no instance can have is not kept."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest("`model` must be a string.", param="model")
    if len(value) > MODEL_LENGTH_MAX:
        raise BadRequest(f"`model` is longer than {MODEL_LENGTH_MAX} characters.", param="model")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRequest("`model` is not valid Unicode.", param="model")
    return value or None


def _upstream(members: list[tuple[str, Any, str]], adds_token_ids: bool, priority: int | None) -> bytes:
    dropped = DROPPED | {"return_token_ids"} if adds_token_ids else DROPPED
    kept = [source for key, _, source in members if key not in dropped]
    if adds_token_ids:
        kept.append('"return_token_ids":true')
    if priority is not None:
        kept.append(f'"priority":{priority}')
    return ("{" + ",".join(kept) + "}").encode()


def _calls_tools_itself(tools: Any) -> bool:
    """Functions (of which Anthropic's have no type) are called by the client, every other kind by the server."""
    if not isinstance(tools, list):
        return False
    own = [one for one in tools if not isinstance(one, dict) or one.get("type") not in (None, "function", "custom")]
    return bool(own)


def _wants_usage(stream_options: Any) -> bool:
    return isinstance(stream_options, dict) and is_true(stream_options.get("include_usage"))


def _is_one_sequence(fields: dict[str, Any]) -> bool:
    if any(fields.get(name) not in (None, 1) for name in ("n", "best_of")) or fields.get("use_beam_search"):
        return False
    prompt = fields.get("prompt")
    return not isinstance(prompt, list) or all(type(token) is int for token in prompt) or len(prompt) == 1
