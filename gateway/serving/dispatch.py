"""Picks an instance for a leg, and counts what has been sent where."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.cluster.members import Instance, Members
from gateway.errors import NoInstance, NotFound
from gateway.policy.dispatch import Sent, choose_instance

REPORT_LAG_S = 0.25
"""A report received within this time of our sending may have been made before the request got there."""
BYTES_PER_TOKEN = 4
"""A rough guess from the length of the body; it matters only until the next report."""


@dataclass(frozen=True, slots=True)
class _Sending:
    at: float
    tokens: int


class Dispatcher:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._in_flight: Counter[str] = Counter()
        self._sendings: dict[str, deque[_Sending]] = {}

    def choose(self, model: str | None, exclude: Collection[str] = ()) -> Instance:
        """Raises :class:`NotFound` for a model that no instance is known to serve, else :class:`NoInstance`."""
        now = time.monotonic()
        view = self._members.view(now)
        chosen = choose_instance(view, model, self._unreported(), exclude)
        instance = None if chosen is None else self._members.get(chosen)
        if instance is not None:
            return instance
        if model is not None and view.instances and not self._members.knows_model(model):
            raise NotFound(f"The model `{model}` does not exist.", param="model")
        raise NoInstance("No instance can serve this model now. Try again later.")

    def hold(self, instance_id: str, body_bytes: int) -> Callable[[], None]:
        """Counts a leg at an instance until the returned function is called; calling it again does nothing."""
        self._in_flight[instance_id] += 1
        sendings = self._sendings.setdefault(instance_id, deque())
        sendings.append(_Sending(time.monotonic(), body_bytes // BYTES_PER_TOKEN))
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._in_flight[instance_id] -= 1
                if not self._in_flight[instance_id]:
                    del self._in_flight[instance_id]

        return release

    def in_flight(self, instance_id: str) -> int:
        return self._in_flight[instance_id]

    def forget(self, is_known: Callable[[str], object]) -> None:
        """What was sent to instances that are no more."""
        self._sendings = {one: sendings for one, sendings in self._sendings.items() if is_known(one)}

    def _unreported(self) -> dict[str, Sent]:
        unreported: dict[str, Sent] = {}
        for member in self._members.all():
            sendings = self._sendings.get(member.instance.instance_id)
            if not sendings:
                continue
            while sendings and sendings[0].at < member.reported_at - REPORT_LAG_S:
                sendings.popleft()
            unreported[member.instance.instance_id] = Sent(len(sendings), sum(one.tokens for one in sendings))
        return unreported
