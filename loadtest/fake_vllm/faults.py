"""What an instance does wrong, from the start or from when it is told to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


class FaultError(ValueError):
    """There is no such fault, or it has no such value."""


@dataclass(slots=True)
class Faults:
    latency_ms: float = 0.0
    """Before every answer."""
    hang_after: int | None = None
    """From this engine step on nothing answers, and connections stay open: as a process under SIGSTOP."""
    die_at_step: int | None = None
    """At this engine step the process is killed; one of several in a process closes its port and its connections."""
    busy: bool = False
    """As one that is full: reports say that there is no room, and every new request is refused: told busy (409) where
    it was to start now, else with 503. Every migration to here is refused too."""
    bad_blocks: bool = False
    """The KV blocks that a peer fetches from here arrive damaged."""

    def set(self, changes: Any) -> None:
        """As JSON. Raises FaultError, and has changed nothing then."""
        if not isinstance(changes, dict):
            raise FaultError("faults must be an object")
        known = {field.name for field in dataclasses.fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise FaultError(f"there is no fault {name!r}: {', '.join(sorted(known))}")
            if not _fits(name, value):
                raise FaultError(f"{value!r} is no value for {name}")
        for name, value in changes.items():
            setattr(self, name, value)


def _fits(name: str, value: Any) -> bool:
    if name in ("busy", "bad_blocks"):
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if name == "latency_ms":
        return isinstance(value, (int, float)) and 0 <= value < float("inf")
    return value is None or (isinstance(value, int) and value >= 0)
