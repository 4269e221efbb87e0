"""Picks an instance for a leg, and counts what has been sent where.

What a request is to be compared with is prepared before it comes: of each instance anew when that has reported, or
something has been sent there or has come back. So a choice among hundreds costs little more than one among a few.
"""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter

from gateway.cluster.members import Instance, Members
from gateway.errors import NoInstance, NotFound, Overloaded
from gateway.policy.dispatch import Sent, queue_length, rank
from gateway.policy.lineup import Lineup, Standing
from gateway.policy.view import InstanceView, ModelGroup
from gateway.policy.waiting import Room, Site, site
from gateway.wire import Busy

REPORT_LAG_S = 0.25
"""A report received within this time of our sending may have been made before the request got there."""
ROOM_LAG_S = 0.1
"""The same where an instance says for itself what it has room for: it corrects us at once if we believe too early that
its report knows of a request, and counting one twice would keep others waiting."""
SENDING_AGE_S_MAX = 60.0
SENDING_LOOK_S = 1.0
"""After that, a request whose instance says nothing of its load is counted as in flight alone."""
OFTEN_S = 0.03
"""While choices come that often, reports are prepared for them as they come; else a choice does it for all at once."""
TRICKLE_S = 5.0
"""An instance whose load is not known, and where nothing of ours runs, gets a request that often: a server may tell
what it told last until the next request makes it look again."""
BYTES_PER_TOKEN = 4
"""A rough guess from the length of the body; it matters only until the next report."""


@dataclass(frozen=True, slots=True)
class _Sending:
    at: float
    tokens: int
    tokens_before: int
    """Of all that were sent there before."""


_sent_at = attrgetter("at")
_NONE: deque[_Sending] = deque()


class Dispatcher:
    def __init__(
        self,
        members: Members,
        requests_max: int = 1024,
        queue_max: int = 256,
        clock: Callable[[], float] = time.monotonic,
        awaits_some: Callable[[], bool] = lambda: False,
    ) -> None:
        """``requests_max``: this gateway's at one instance. ``queue_max``: an instance's share of a full cluster's.
        ``awaits_some``: whether an instance that is wanted has never said yet what it serves."""
        self._members = members
        self._clock = clock
        self._awaits_some = awaits_some
        self._changed = members.follow()
        """Instances of which something has changed since they were prepared."""
        self._standings: dict[str, Standing] = {}
        """Of those that are usable."""
        self._lineups: dict[str | None, Lineup] = {}
        """By model, of those that are asked for: what nobody asks for any more is forgotten."""
        self._asked: set[str | None] = set()
        self._aged_at = self._asked_at = -math.inf
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
        protected_tokens: int | None = None,
    ) -> Instance:
        """Raises :class:`NotFound` for a model that no instance serves, else :class:`NoInstance`.

        ``group``: of a request that has begun; it goes on only where the same is served. ``is_new``: nobody works on
        the request yet, so that it can be turned away when all queues are long. ``waiting``: at gateways.
        ``protected_tokens``: of the prompt of one with headroom.
        """
        now, served = self._clock(), self.lineup(model)
        lineup = served.only(exclude)
        if is_new and lineup and (waiting + lineup.queued >= self._queue_max * len(lineup) or lineup.is_full):
            raise _overloaded()
        if group is not None:
            lineup = lineup.only((), group)
        joined = lineup.best_protecting(protected_tokens) if protected_tokens is not None else None
        chosen = joined or self._trickle(lineup, now) or lineup.best()
        instance = None if chosen is None else self._members.get(chosen)
        if instance is not None:
            return instance
        if model is not None and self._members.all() and not self._members.knows_model(model):
            if self._awaits_some():
                raise NoInstance("No instance that has answered yet serves this model. Try again later.")
            raise NotFound(f"The model `{model}` does not exist.", param="model")
        raise self.nobody_usable(model)

    def nobody_usable(self, model: str | None) -> NoInstance:
        """Of those that are known to serve it; and why, where an operator wants it so."""
        serving = [one for one in self._members.all() if model is None or model in one.models]
        if serving and all(one.draining for one in serving):
            return NoInstance("All instances that serve this model are draining. Try again later.")
        return NoInstance("No instance can serve this model now. Try again later.")

    def reported(self) -> None:
        """An instance has said something new. Where choices come often, none of them has to make up for a hundred
        reports."""
        now = self._clock()
        if now - self._asked_at < OFTEN_S:
            self._prepare(now)

    def lineup(self, model: str | None) -> Lineup:
        """The usable instances that serve it, as they are now; to be read at once, and not to be kept."""
        self._asked_at = self._clock()
        self._prepare(self._asked_at)
        self._asked.add(model)
        lineup = self._lineups.get(model)
        if lineup is None:
            lineup = Lineup(one for one in self._standings.values() if model is None or one.view.serves(model))
            if lineup:  # Else it may be any name that a client has made up.
                self._lineups[model] = lineup
        return lineup

    def check_depth(self, lineup: Lineup, waiting: int) -> None:
        """As for :meth:`choose`, where requests wait at the gateways: raises :class:`Overloaded`."""
        if lineup and (self.places_left(lineup, waiting) <= 0 or lineup.is_full):
            raise _overloaded()

    def places_left(self, lineup: Lineup, waiting: int) -> int:
        """So many more requests may wait, there or at the gateways."""
        return self._queue_max * len(lineup) - waiting - lineup.queued_at_sites

    def models(self) -> list[str]:
        """All that an instance is known to serve."""
        return sorted({model for member in self._members.all() for model in member.models})

    def instance(self, instance_id: str) -> Instance | None:
        return self._members.get(instance_id)

    def said_busy(self, instance: Instance, busy: Busy) -> None:
        """Its next report is the truth again."""
        self._busy[instance] = self._clock(), Room(busy.room_blocks, busy.room_places)
        self._changed.add(instance.instance_id)

    def block_size(self, instance: Instance) -> int:
        view = self._members.view_of(instance.instance_id)
        return view.block_size if view is not None else 1

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
        tokens_before = sendings[-1].tokens_before + sendings[-1].tokens if sendings else 0
        sendings.append(_Sending(self._clock(), body_bytes // BYTES_PER_TOKEN, tokens_before))
        self._changed.add(instance_id)
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._changed.add(instance_id)
                self._in_flight[instance_id] -= 1
                if not self._in_flight[instance_id]:
                    del self._in_flight[instance_id]

        return release

    def in_flight(self, instance_id: str) -> int:
        return self._in_flight[instance_id]

    def all_in_flight(self) -> dict[str, int]:
        """This gateway's, by instance id; those without any are left out."""
        return dict(self._in_flight)

    def forget(self, is_known: Callable[[str], object]) -> None:
        """What was sent to instances that are no more, and models that nobody has asked for since the last time."""
        self._lineups = {model: lineup for model, lineup in self._lineups.items() if model in self._asked}
        self._asked.clear()
        self._sendings = {one: sendings for one, sendings in self._sendings.items() if is_known(one)}
        self._busy = {one: said for one, said in self._busy.items() if is_known(one.instance_id) == one}
        self._trickled_at = {one: at for one, at in self._trickled_at.items() if is_known(one.instance_id) == one}

    def may_come(self, model: str | None, exclude: Collection[str], group: ModelGroup | None = None) -> bool:
        """Whether an instance is known that could serve it, were it usable; or none is known to, but not all have said
        yet what they serve, as when a gateway has just started."""
        if not self._members.all():
            return True
        if model is not None and not self._members.knows_model(model):
            return self._awaits_some()
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

    def _prepare(self, now: float) -> None:
        self._members.refresh(now)
        if now - self._aged_at >= SENDING_LOOK_S:
            self._aged_at = now
            oldest = now - SENDING_AGE_S_MAX
            self._changed.update(
                one for one, sendings in self._sendings.items() if sendings and sendings[0].at < oldest
            )
        for instance_id in self._changed:
            standing = self._stand(instance_id, now)
            if standing is None:
                self._standings.pop(instance_id, None)
            else:
                self._standings[instance_id] = standing
            for model, lineup in self._lineups.items():
                if standing is not None and (model is None or standing.view.serves(model)):
                    lineup.put(standing)
                else:
                    lineup.drop(instance_id)
        self._changed.clear()

    def _stand(self, instance_id: str, now: float) -> Standing | None:
        """``None`` if nothing is to be sent there."""
        view = self._members.view_of(instance_id)
        if view is None or not view.usable:
            return None
        known_at = self._members.known_at(instance_id)
        sendings, in_flight = self._sent_lately(instance_id, known_at, now), self._in_flight[instance_id]
        sent = room_sent = Sent(0, 0, in_flight)
        if sendings:
            sent = _sent(sendings, known_at - REPORT_LAG_S, in_flight)
            room_sent = _sent(sendings, known_at - ROOM_LAG_S, in_flight)
        return Standing(
            view,
            rank(view, sent),
            queue_length(view, sent),
            in_flight,
            in_flight >= self._requests_max,
            self._site(view, room_sent),
        )

    def _sent_lately(self, instance_id: str, known_at: float, now: float) -> deque[_Sending]:
        sendings = self._sendings.get(instance_id, _NONE)
        known_until = max(known_at - REPORT_LAG_S, now - SENDING_AGE_S_MAX)
        while sendings and sendings[0].at < known_until:
            sendings.popleft()
        return sendings

    def _trickle(self, lineup: Lineup, now: float) -> str | None:
        for one in lineup.load_unknown:
            instance = self._members.get(one.view.instance_id)
            if instance is None:
                continue
            at = self._trickled_at.setdefault(instance, now)
            if now - at >= TRICKLE_S and one.in_flight == 0:
                self._trickled_at[instance] = now
                return instance.instance_id
        return None


def _sent(sendings: deque[_Sending], since: float, in_flight: int) -> Sent:
    """Of those since then, found by their order: on a busy gateway they are hundreds."""
    first = bisect_left(sendings, since, key=_sent_at)
    if first == len(sendings):
        return Sent(0, 0, in_flight)
    last = sendings[-1]
    return Sent(len(sendings) - first, last.tokens_before + last.tokens - sendings[first].tokens_before, in_flight)


def _overloaded() -> Overloaded:
    return Overloaded("Too many requests are waiting for this model. Try again later.", code="overloaded")
