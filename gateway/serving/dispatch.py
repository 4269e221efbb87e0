"""Picks an instance for a leg, and counts what has been sent where."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.cluster.members import Instance, Members
from gateway.errors import NoInstance, NotFound, Overloaded
from gateway.policy.dispatch import Sent, choose_instance, queue_length, usable_instances
from gateway.policy.view import ClusterView, InstanceView, ModelGroup
from gateway.policy.waiting import Room, Site, site
from gateway.wire import Busy

REPORT_LAG_S = 0.25
"""A report received within this time of our sending may have been made before the request got there."""
ROOM_LAG_S = 0.1
"""The same where an instance says for itself what it has room for: it corrects us at once if we believe too early that
its report knows of a request, and counting one twice would keep others waiting."""
SENDING_AGE_S_MAX = 60.0
"""After that, a request whose instance says nothing of its load is counted as in flight alone."""
TRICKLE_S = 5.0
"""An instance whose load is not known, and where nothing of ours runs, gets a request that often: a server may tell
what it told last until the next request makes it look again."""
BYTES_PER_TOKEN = 4
"""A rough guess from the length of the body; it matters only until the next report."""


@dataclass(frozen=True, slots=True)
class _Sending:
    at: float
    tokens: int


_NONE: deque[_Sending] = deque()


class Dispatcher:
    def __init__(self, members: Members, requests_max: int = 1024, queue_max: int = 256) -> None:
        """``requests_max``: this gateway's at one instance. ``queue_max``: an instance's share of a full cluster's."""
        self._members = members
        self._requests_max = requests_max
        self._queue_max = queue_max
        self._trickled_at: dict[Instance, float] = {}
        self._in_flight: Counter[str] = Counter()
        self._sendings: dict[str, deque[_Sending]] = {}
        self._busy: dict[Instance, tuple[float, Room]] = {}
        """What instances have said since their last report, and when."""

    def choose(
        self,
        model: str | None,
        exclude: Collection[str] = (),
        group: ModelGroup | None = None,
        *,
        is_new: bool = False,
        waiting: int = 0,
    ) -> Instance:
        """Raises :class:`NotFound` for a model that no instance is known to serve, else :class:`NoInstance`.

        ``group``: of a request that has begun; it goes on only where the same is served. ``is_new``: nobody works on
        the request yet, so that it can be turned away when all queues are long. ``waiting``: at gateways.
        """
        now = time.monotonic()
        view = self._members.view(now)
        sent = self._sent(now)
        full = {one for one, here in sent.items() if here.in_flight >= self._requests_max}
        if is_new:
            self._check_depth(view, model, sent, exclude, full, waiting)
        chosen = self._trickle(usable_instances(view, model, exclude, group), sent, now) or choose_instance(
            view, model, sent, full.union(exclude), group
        )
        instance = None if chosen is None else self._members.get(chosen)
        if instance is not None:
            return instance
        if model is not None and view.instances and not self._members.knows_model(model):
            raise NotFound(f"The model `{model}` does not exist.", param="model")
        raise NoInstance("No instance can serve this model now. Try again later.")

    def sites(self, model: str | None) -> list[Site]:
        """The usable instances that serve it, as places to start at now."""
        now = time.monotonic()
        view, sent = self._members.view(now), self._sent(now, ROOM_LAG_S)
        return [self._site(one, sent[one.instance_id]) for one in usable_instances(view, model)]

    def check_depth(self, sites: Collection[Site], waiting: int) -> None:
        """As for :meth:`choose`, where requests wait at the gateways: raises :class:`Overloaded`."""
        waiting += sum(one.queued for one in sites)
        is_full = all(self._in_flight[one.instance_id] >= self._requests_max for one in sites)
        if sites and (waiting >= self._queue_max * len(sites) or is_full):
            raise _overloaded()

    def binds_late(self) -> bool:
        """Whether any instance says for itself what it has room for."""
        return any(one.report is not None and one.report.room_blocks is not None for one in self._members.all())

    def models(self) -> list[str]:
        """All that an instance is known to serve."""
        return sorted({model for member in self._members.all() for model in member.models})

    def instance(self, instance_id: str) -> Instance | None:
        return self._members.get(instance_id)

    def said_busy(self, instance: Instance, busy: Busy) -> None:
        """Its next report is the truth again."""
        self._busy[instance] = time.monotonic(), Room(busy.room_blocks, busy.room_places)

    def block_size(self, instance: Instance) -> int:
        member = next((one for one in self._members.all() if one.instance == instance), None)
        return member.report.block_size if member is not None and member.report is not None else 1

    def _site(self, view: InstanceView, sent: Sent) -> Site:
        one = site(view, sent)
        if sent.in_flight >= self._requests_max:
            return dataclasses.replace(one, room=Room(0, 0))
        instance = self._members.get(one.instance_id)
        if instance is None or instance not in self._busy:
            return one
        said_at, said = self._busy[instance]
        if self._members.reported_at(instance.instance_id) > said_at:
            del self._busy[instance]
            return one
        less = Room(min(one.room.blocks, said.blocks), min(one.room.places, said.places))
        return dataclasses.replace(one, room=less)

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
        self._busy = {one: said for one, said in self._busy.items() if is_known(one.instance_id) == one}

    def may_come(self, model: str | None, exclude: Collection[str], group: ModelGroup | None = None) -> bool:
        """Whether an instance is known that could serve it, were it usable."""
        return any(
            member.instance.instance_id not in exclude
            and (model is None or model in member.models)
            and (group is None or group in member.groups)
            for member in self._members.all()
        )

    def check_room(self, instance_id: str) -> None:
        """For a request that can only go there. Raises :class:`Overloaded`."""
        if self._in_flight[instance_id] >= self._requests_max:
            raise _overloaded()

    def without_plugin(self) -> set[str]:
        return {member.instance.instance_id for member in self._members.all() if not member.instance.managed}

    def _check_depth(
        self,
        view: ClusterView,
        model: str | None,
        sent: dict[str, Sent],
        exclude: Collection[str],
        full: set[str],
        waiting: int,
    ) -> None:
        usable = usable_instances(view, model, exclude)
        if not usable:
            return
        waiting += sum(queue_length(one, sent[one.instance_id]) for one in usable)
        if waiting >= self._queue_max * len(usable) or all(one.instance_id in full for one in usable):
            raise _overloaded()

    def _trickle(self, usable: list[InstanceView], sent: dict[str, Sent], now: float) -> str | None:
        for one in usable:
            instance = self._members.get(one.instance_id)
            if one.load_known or instance is None:
                continue
            at = self._trickled_at.setdefault(instance, now)
            if now - at >= TRICKLE_S and sent[one.instance_id].in_flight == 0:
                self._trickled_at[instance] = now
                return one.instance_id
        return None

    def _sent(self, now: float, lag_s: float = REPORT_LAG_S) -> dict[str, Sent]:
        sent: dict[str, Sent] = {}
        for member in self._members.all():
            instance_id = member.instance.instance_id
            sendings = self._sendings.get(instance_id, _NONE)
            known_until = max(member.known_at - REPORT_LAG_S, now - SENDING_AGE_S_MAX)
            while sendings and sendings[0].at < known_until:
                sendings.popleft()
            fresh = [one for one in sendings if one.at >= member.known_at - lag_s]
            sent[instance_id] = Sent(len(fresh), sum(one.tokens for one in fresh), self._in_flight[instance_id])
        for instance in [one for one in self._trickled_at if self._members.get(one.instance_id) != one]:
            del self._trickled_at[instance]
        return sent


def _overloaded() -> Overloaded:
    return Overloaded("Too many requests are waiting for this model. Try again later.", code="overloaded")
