"""On what terms a request is served: how urgent it is, what it may ask for, and how many tokens it may come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway.errors import BadRequest
from gateway.openai.caps import Caps, check_caps, prompts, whole_number
from gateway.wire import PriorityClass

PRIORITY_HEADER = "x-kvferry-priority"
"""A client's, with the name of a class; it comes before ``service_tier``. In a reply: the class that was given."""

TIERS = {
    "auto": PriorityClass.NORMAL,
    "default": PriorityClass.NORMAL,
    "standard_only": PriorityClass.NORMAL,  # Anthropic's name for it.
    "flex": PriorityClass.LOW,
    "priority": PriorityClass.HIGH,
    "scale": PriorityClass.HIGH,
}
WORDS = {one.word: one for one in PriorityClass}

BYTES_PER_TOKEN = 4
OUTPUT_TOKENS_GUESSED = 256
"""For a request that does not say how many it wants at most."""


class Work(Enum):
    """What a request makes of its tokens."""

    GENERATES = "generates"
    COMPUTES = "computes"
    """They pass through the model, and none come out."""
    PREPARES = "prepares"
    """They are only counted, translated or looked up: no model, and so no tokens and no priority."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens, from the size of the body: nothing is tokenized here, since that would hold up every other stream."""

    prompt: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Terms:
    """What a key grants, and what its request's headers ask for."""

    caps: Caps = field(default_factory=Caps)
    priority_max: PriorityClass = PriorityClass.HIGH
    priority_header: str | None = None
    sends_priority: bool = True
    """Off for instances that refuse any ``priority`` but 0."""
    work: Work = Work.GENERATES
    key_id: str = ""
    """Of the key, where there is another one to share with."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``priority``: the instance's field, or ``None`` where its default says the same. ``chosen``: by the client."""

    priority_class: PriorityClass
    priority: int | None
    chosen: bool
    estimate: Estimate
    key_id: str = ""
    """Whose place it takes where requests wait; empty where nobody has to share."""


def read_asked(fields: Mapping[str, Any], body_bytes: int, terms: Terms) -> Asked:
    """Raises :class:`BadRequest` for an unknown class, and for what goes beyond the caps."""
    check_caps(fields, terms.caps)
    chosen = _chosen_class(fields.get("service_tier"), terms.priority_header)
    # Lower is sooner, for the class as for vLLM: the key's highest class is the smallest number that it may have.
    granted = max(chosen if chosen is not None else PriorityClass.NORMAL, terms.priority_max)
    tells = terms.sends_priority and terms.work is not Work.PREPARES and granted != PriorityClass.NORMAL
    priority = int(granted) if tells else None
    return Asked(granted, priority, chosen is not None, _estimate(fields, body_bytes, terms.work), terms.key_id)


def _chosen_class(tier: Any, header: str | None) -> PriorityClass | None:
    if tier is not None and (not isinstance(tier, str) or tier not in TIERS):
        raise BadRequest(f"`service_tier` must be one of {', '.join(TIERS)}.", param="service_tier")
    if header is None:
        return None if tier is None else TIERS[tier]
    if header.strip().lower() not in WORDS:
        raise BadRequest(f"The header `{PRIORITY_HEADER}` must be one of {', '.join(WORDS)}.", param=PRIORITY_HEADER)
    return WORDS[header.strip().lower()]


def _estimate(fields: Mapping[str, Any], body_bytes: int, work: Work) -> Estimate:
    if work is Work.PREPARES:
        return Estimate()
    prompt = body_bytes // BYTES_PER_TOKEN
    if work is Work.COMPUTES:
        return Estimate(prompt)
    named = (fields.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    each = next((number for value in named if (number := whole_number(value)) is not None), OUTPUT_TOKENS_GUESSED)
    several = prompts(fields.get("prompt")) * prompts(fields.get("messages"))
    sequences = max(1, whole_number(fields.get("n")) or 1) * several
    return Estimate(prompt, max(0, each) * sequences)
