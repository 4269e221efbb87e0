"""Bounds on what one request may ask for. Generous by default: they stop what would keep a server busy for hours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Caps:
    """0 forbids a parameter; for ``n`` and ``prompts`` one is always allowed."""

    n: int = 128
    """``n`` and ``best_of``."""
    beam_width: int = 16
    """``n`` with ``use_beam_search``."""
    logprobs: int = 1000
    """``logprobs``, ``top_logprobs`` and ``prompt_logprobs``; -1, which is the whole vocabulary, is above any cap."""
    max_tokens: int = 1_048_576
    prompts: int = 2048
    """Prompts, inputs or documents in one request."""
    sequences: int = 8192
    """Prompts times ``n``."""
    stop: int = 256
    """Strings in ``stop`` and in ``bad_words``."""


_COUNTS = (
    ("n", "n"),
    ("best_of", "n"),
    ("logprobs", "logprobs"),
    ("top_logprobs", "logprobs"),
    ("prompt_logprobs", "logprobs"),
    ("max_tokens", "max_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("max_output_tokens", "max_tokens"),
    ("min_tokens", "max_tokens"),
)
_LISTS = (
    *("prompt", "prompt_embeds", "messages", "input", "inputs", "texts", "images", "items"),
    *("documents", "queries", "text_1", "text_2", "data_1", "data_2"),
)
_TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})


def check_caps(fields: Mapping[str, Any], caps: Caps) -> None:
    """Raises :class:`BadRequest`, which names the parameter and the bound."""
    for param, cap in _COUNTS:
        if param not in fields:
            continue
        bound = getattr(caps, cap)
        value = whole_number(fields[param])
        if value is not None and (value > max(bound, cap == "n") or (value < 0 and cap == "logprobs")):
            raise BadRequest(f"`{param}` must be at most {bound} on this gateway, not {_shown(value)}.", param=param)
    for param in ("stop", "bad_words"):
        if isinstance(fields.get(param), list) and len(fields[param]) > caps.stop:
            raise _too_many(param, len(fields[param]), caps.stop, "strings")
    for param in _LISTS:
        if param in fields and (count := prompts(fields[param])) > max(1, caps.prompts):
            raise _too_many(param, count, caps.prompts, "entries")
    _check_sequences(fields, caps)


def _check_sequences(fields: Mapping[str, Any], caps: Caps) -> None:
    each = max(whole_number(fields.get(param)) or 1 for param in ("n", "best_of"))
    if is_true(fields.get("use_beam_search")) and each > caps.beam_width:
        if caps.beam_width == 0:
            raise BadRequest("`use_beam_search` is not allowed on this gateway.", param="use_beam_search")
        message = f"`n` must be at most {caps.beam_width} with `use_beam_search` on this gateway, not {each}."
        raise BadRequest(message, param="n")
    count = prompts(fields.get("prompt")) * prompts(fields.get("messages"))
    if count * each > max(caps.sequences, 1) and count > 1:
        message = (
            f"`n` times the number of prompts must be at most {caps.sequences} on this gateway, not {count * each}."
        )
        raise BadRequest(message, param="n")


def prompts(value: Any) -> int:
    """How many there are in a field that takes one or a list of them. A list of numbers is the tokens of one, and a
    list of messages is one chat.
    """
    if not isinstance(value, list) or not value or type(value[0]) is int:
        return 1
    return len(value) if not isinstance(value[0], dict) or "role" not in value[0] else 1


def whole_number(value: Any) -> int | None:
    """As the instance's own lax reading has it, which takes 2.0 and "2" for 2; ``None`` for what it refuses."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) else None


def is_true(value: Any) -> bool:
    """As the instance's own lax reading of a boolean."""
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in _TRUE_WORDS)


def _too_many(param: str, count: int, bound: int, what: str) -> BadRequest:
    return BadRequest(f"`{param}` may have at most {bound} {what} on this gateway, not {count}.", param=param)


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "such a number"


def read_caps(value: str) -> Caps:
    """From ``n=16,stop=8``; what is not named keeps its default. Raises :class:`ValueError` that names the field."""
    names = {field.name for field in dataclasses.fields(Caps)}
    changes: dict[str, int] = {}
    for item in filter(None, (item.strip() for item in value.split(","))):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in names:
            raise ValueError(f"{name} is no cap; there are {', '.join(sorted(names))}")
        if not number.isascii() or not number.isdecimal() or len(number) > 18:
            raise ValueError(f"{name} must be a whole number, not {number!r}")
        changes[name] = int(number)
    return dataclasses.replace(Caps(), **changes)
