"""All instances as a decision sees them, kept up to date one by one: a report changes one of them, and time a few."""

from __future__ import annotations

import math
from collections.abc import Callable

from gateway.policy.view import ClusterView, InstanceView

Look = tuple[InstanceView, float]
"""How an instance is seen, and the moment after which time alone may change that."""


class Views:
    """Holds what ``look`` says of each instance until that is told to have changed, or its time is over.

    ``look(instance_id, now)`` answers ``None`` for an instance that is no more. Always equal to looking at all of them
    anew, at a cost by what has changed.
    """

    def __init__(self, look: Callable[[str, float], Look | None]) -> None:
        self._look = look
        self._views: dict[str, InstanceView] = {}
        self._holds_until: dict[str, float] = {}
        self._next_at = math.inf
        """Until then nothing changes by time alone: not later than the earliest of the above."""
        self._looked_at = -math.inf
        self._changed: set[str] = set()
        self._followers = [self._changed]
        self._all: ClusterView | None = ClusterView(())

    def changed(self, instance_id: str) -> None:
        for follower in self._followers:
            follower.add(instance_id)

    def follow(self) -> set[str]:
        """The ids of those that have changed, from now on: the follower reads the set after ``refresh`` and empties it.
        At most one entry an instance, so it may be left alone for long."""
        follower = set(self._views) | self._changed
        self._followers.append(follower)
        return follower

    def refresh(self, now: float) -> None:
        if now > self._next_at or now < self._looked_at:
            self._find_changed_by_time(now)
        self._looked_at = now
        if not self._changed:
            return
        self._all = None
        for instance_id in self._changed:
            looked = self._look(instance_id, now)
            if looked is None:
                self._views.pop(instance_id, None)
                self._holds_until.pop(instance_id, None)
            else:
                self._views[instance_id], holds_until = looked
                self._holds_until[instance_id] = holds_until
                self._next_at = min(self._next_at, holds_until)
        self._changed.clear()

    def get(self, instance_id: str) -> InstanceView | None:
        """As of the last refresh."""
        return self._views.get(instance_id)

    def all(self, now: float) -> ClusterView:
        self.refresh(now)
        if self._all is None:
            self._all = ClusterView(tuple(self._views[instance_id] for instance_id in sorted(self._views)))
        return self._all

    def _find_changed_by_time(self, now: float) -> None:
        is_earlier = now < self._looked_at
        for instance_id, holds_until in self._holds_until.items():
            if now > holds_until or is_earlier:
                self.changed(instance_id)
        self._next_at = min(
            (until for instance_id, until in self._holds_until.items() if instance_id not in self._changed),
            default=math.inf,
        )
