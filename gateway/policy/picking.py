"""Which request a source moves: lowest execution priority first, then the shortest (Llumnix, section 4.4.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PickRules:
    cool_down_s: float = 1.0
    """After a move a request stays that long."""
    moves_max: int | None = None
    """Of one request, except away from a draining instance."""


@dataclass(frozen=True, slots=True)
class Movable:
    request_id: str
    execution_priority: int
    tokens: int
    is_running: bool
    moves: int = 0
    settled_s: float = float("inf")
    """Since its last move."""
    is_protected: bool = False
    """It has headroom: what makes its instance look full is kept free for it, and no reason to move it."""


def pick(candidates: Iterable[Movable], rules: PickRules, *, draining: bool = False) -> str | None:
    """Of running requests; a draining instance is left by queued ones as well, and by those that have moved often."""
    fitting = [
        (one.execution_priority, one.tokens, one.request_id)
        for one in candidates
        if (draining or (one.is_running and not one.is_protected))
        and one.settled_s >= rules.cool_down_s
        and (draining or rules.moves_max is None or one.moves < rules.moves_max)
    ]
    return min(fitting)[2] if fitting else None
