"""Where a request waits that cannot start now: here, at the gateway, and not in an instance's own queue.

There are two reasons to wait. No instance has *room*: then its place is by class and age, in an order that all gateways
share through Redis, and it starts at the first instance that has room for it (policy/waiting.py says who goes where).
Or no instance is *usable* at all: a machine that stands still for seconds makes all its instances look gone, and a
model may have one instance, which is just being restarted; that is waited for a little.

One round of :meth:`Waiting.look` serves all that wait: woken by what is new, at most once a tick, and it asks Redis
only when the reports show room for one of ours, or when the line has to be told something.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.cluster import keys
from gateway.cluster.members import Instance
from gateway.cluster.order import PUT_AT_ONCE, Ask, Entry, Line, SharedOrder
from gateway.counters import Counters
from gateway.errors import GatewayError, NoInstance, Overloaded
from gateway.policy.lineup import Lineup
from gateway.policy.view import ModelGroup
from gateway.policy.waiting import Site, Waiter, WaitingRules, allot, kept_instance
from gateway.serving.dispatch import Dispatcher
from gateway.serving.shares import Shares
from gateway.wire import Busy, PriorityClass

TICK_S = 0.05
LOOK_S = 0.05
IDLE_S = 1.0
"""How often it is asked, while nobody waits here, whether anybody waits elsewhere."""
QUIET_S = 0.25
"""The longest time between two rounds while somebody waits, should nothing wake them: for the sake of time limits."""
TRIES_AT_ONCE = 3
"""Instances that may say busy to one request before it waits in between."""
BUSY_WAIT_S = 0.1
BUSY_WAIT_S_MAX = 2.0
LEAVE_S = 0.15
"""Others see a request in the line for so long after it was sent off. Until their reports know of it, it is well that
they leave room for it; and one that is told busy has not lost its place meanwhile."""
YIELD_S = 1.0
"""So long room is left for another gateway's request that comes first. One that has not taken it by then is stuck."""
GUESS_BYTES_PER_TOKEN = 6
"""A prompt's tokens by the size of its body: rather too few, for the instance corrects that, and nothing too many."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place among those that wait. It keeps it until it has begun: whoever is told busy by an instance does
    not go to the end of the line."""

    request_id: str
    model: str | None
    priority_class: PriorityClass
    tokens: int
    """Of its prompt: a guess, until an instance has said better."""
    key_id: str = ""
    """With whom it shares a part of the line (shares.py)."""
    since: float = field(default_factory=time.monotonic)
    exclude: frozenset[str] = frozenset()
    busies: int = 0
    not_before: float = 0.0
    unusable_since: float | None = None
    has_waited: bool = False
    is_told: bool = False
    """Redis knows of it."""
    chosen: asyncio.Future[Instance] | None = None
    is_protected: bool = False
    """Its class has headroom."""

    def waiter(self, now: float) -> Waiter:
        waited_s = now - self.since
        return Waiter(
            self.request_id, self.priority_class, waited_s, self.tokens, self.exclude, is_protected=self.is_protected
        )

    def entry(self, now: float) -> Entry:
        return Entry(self.request_id, self.priority_class, now - self.since, self.tokens)

    @property
    def is_open(self) -> bool:
        return self.chosen is not None and not self.chosen.done()


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    instance_wait_s: float
    """While none of a model's instances is usable."""
    room_wait_s: float
    """While none has room."""
    waiters_max: int
    """In this gateway at a time, whatever they wait for."""


class Waiting:
    def __init__(
        self,
        dispatcher: Dispatcher,
        order: SharedOrder,
        rules: WaitingRules,
        limits: WaitingLimits,
        counters: Counters,
        *,
        binds_late: bool,
        protected: Collection[PriorityClass] = (),
    ) -> None:
        """``binds_late``: else a request goes to the best instance at once, and waits in its queue if need be.
        ``protected``: the classes with headroom."""
        self._protected = frozenset(protected)
        self._dispatcher = dispatcher
        self._order = order
        self._rules = rules
        self._limits = limits
        self._counters = counters
        self._binds_late = binds_late
        self._decisions = counters.distribution("decision_seconds")
        self._waiters = 0
        self._shares = Shares()
        self._lines: dict[str | None, dict[str, Ticket]] = {}
        """Own tickets by model, in the order in which they came."""
        self._left: dict[str | None, dict[str, float]] = {}
        """Those that Redis is still to be told have left, and since when."""
        self._elsewhere: dict[str, int] = {}
        """Requests of other gateways that wait, by model, as of the last time that Redis was asked."""
        self._yielded: dict[str | None, dict[str, float]] = {}
        """Requests of others for which room is left, by model, and since when."""
        self._news = asyncio.Event()
        self._renewed_at = self._looked_elsewhere_at = -float("inf")

    # What a request calls.

    def ticket(
        self, request_id: str, model: str | None, priority_class: PriorityClass, body_bytes: int, key_id: str
    ) -> Ticket:
        is_protected = priority_class in self._protected
        tokens = body_bytes // GUESS_BYTES_PER_TOKEN
        return Ticket(request_id, model, priority_class, tokens, key_id, is_protected=is_protected)

    async def start(self, ticket: Ticket, exclude: Collection[str] = (), *, is_new: bool = True) -> Instance:
        """Where the request is to be sent now. Raises :class:`Overloaded` when too many wait or it has waited for too
        long, :class:`LimitReached` when too many of its key do, and else like :meth:`Dispatcher.choose`. Redis is not
        asked while there is room and nobody waits."""
        model, ticket.exclude = ticket.model, frozenset(exclude)
        began_at = time.perf_counter()
        lineup = self._lineup(model, ticket.exclude)
        if not lineup.says_room:
            protected_tokens = ticket.tokens if ticket.is_protected else None
            return await self.choose(model, exclude, is_new=is_new, protected_tokens=protected_tokens)
        if is_new and not ticket.busies:
            self._dispatcher.check_depth(lineup, self.length(model))
        if ticket.busies < TRIES_AT_ONCE and not self.length(model):
            best = lineup.best_site(ticket.waiter(time.monotonic()))
            if best is not None and (instance := self._dispatcher.instance(best.instance_id)) is not None:
                self._note_wait(ticket)
                self._decisions.observe(time.perf_counter() - began_at)
                return instance
        if is_new and not ticket.has_waited:
            places_left = self._dispatcher.places_left(lineup, self.length(model))
            self._shares.check(ticket.key_id, min(places_left, self._limits.waiters_max - self._waiters))
        with self._place_in_line(ticket) as chosen, self._shares.taken(ticket.key_id):
            instance = await chosen
        self._note_wait(ticket)
        return instance

    def was_busy(self, ticket: Ticket, instance: Instance, busy: Busy) -> None:
        """``instance`` has not let it in: it looks elsewhere, or for a newer report."""
        self._counters.add("busy_answers", instance_id=instance.instance_id)
        self._dispatcher.said_busy(instance, busy)
        if busy.blocks_needed is not None:
            ticket.tokens = busy.blocks_needed * self._dispatcher.block_size(instance)
            ticket.is_told = False
        ticket.busies += 1
        if ticket.busies >= TRIES_AT_ONCE:
            wait_s = min(BUSY_WAIT_S * 2 ** min(ticket.busies - TRIES_AT_ONCE, 10), BUSY_WAIT_S_MAX)
            ticket.not_before = time.monotonic() + wait_s

    def marks(self, instance: Instance, *, is_one_sequence: bool) -> bool:
        """Whether a request sent there is to be told at once if it cannot start. Of several sequences, some might."""
        return self._binds_late and instance.managed and is_one_sequence

    async def choose(
        self,
        model: str | None,
        exclude: Collection[str] = (),
        group: ModelGroup | None = None,
        *,
        is_new: bool = True,
        protected_tokens: int | None = None,
    ) -> Instance:
        """As :meth:`Dispatcher.choose`, later: the best one, whether it has room or not."""
        began_at = time.perf_counter()
        waiting = self.length(model) if is_new else 0
        try:
            instance = self._dispatcher.choose(
                model, exclude, group, is_new=is_new, waiting=waiting, protected_tokens=protected_tokens
            )
            self._decisions.observe(time.perf_counter() - began_at)
            return instance
        except Overloaded:
            raise
        except NoInstance:
            if self._waiters >= self._limits.waiters_max or not self._dispatcher.may_come(model, exclude, group):
                raise
        self._counters.add("requests_waited")
        self._waiters += 1
        try:
            return await self._until_usable(model, exclude, group, is_new)
        finally:
            self._waiters -= 1

    async def _until_usable(
        self, model: str | None, exclude: Collection[str], group: ModelGroup | None, is_new: bool
    ) -> Instance:
        ends_at = time.monotonic() + self._limits.instance_wait_s
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                return self._dispatcher.choose(model, exclude, group, is_new=is_new)
            except Overloaded:
                raise
            except NoInstance:
                if time.monotonic() >= ends_at:
                    raise

    def _lineup(self, model: str | None, exclude: Collection[str]) -> Lineup:
        """An empty one where requests are not bound late."""
        return self._dispatcher.lineup(model).only(exclude) if self._binds_late else Lineup()

    # What is asked of it.

    def length(self, model: str | None) -> int:
        """Requests that wait for room for this model, here and, as far as is known, at other gateways."""
        return len(self._lines.get(model, ())) + self._elsewhere.get(model or "", 0)

    async def kept(self) -> frozenset[str]:
        """The instances that take nobody else until a request fits there that has waited longest, at any gateway: of
        each model one at most. Asks Redis, as long as anybody is known to wait."""
        known = {*(model or "" for model in self._lines), *self._elsewhere}
        names = sorted(name for name in known if self.length(name or None))
        if not self._binds_late or not names:
            return frozenset()
        lines = await self._order.look([Ask(name, (), ()) for name in names])
        now = time.monotonic()
        found = set()
        for name, line in zip(names, lines if lines is not None else [None] * len(names), strict=True):
            model = name or None
            waiters = self._waiters_of(self._lines.get(model, {}), line, (), now)
            found.add(kept_instance(waiters, self._dispatcher.lineup(model).sites(), self._rules))
        return frozenset(one for one in found if one is not None)

    def waiting_by_class(self) -> dict[PriorityClass, int]:
        """In this gateway."""
        counts = dict.fromkeys(PriorityClass, 0)
        for line in self._lines.values():
            for ticket in line.values():
                counts[ticket.priority_class] += 1
        return counts

    def wake(self) -> None:
        """Something has changed that may make room."""
        if self._lines:
            self._news.set()

    async def look(self) -> None:
        """A round of the background loop, which leaves a tick between two."""
        await self._wait_for_news()
        if not self._order.is_shared and await self._order.try_again():
            self._forget_telling()
        now = time.monotonic()
        models = [*self._lines, *(model for model in self._left if model not in self._lines)]
        sites = {model: self._dispatcher.lineup(model).sites() for model in models}
        for model, tickets in self._lines.items():
            for ticket in tickets.values():
                self._check_time(ticket, sites[model], now)
        asks = self._asks(models, sites, now)
        lines = await self._order.look(list(asks.values())) if asks else None
        shared = dict(zip(asks, lines, strict=True)) if lines is not None else {}
        for model, line in shared.items():
            self._told(model, asks[model], line)
        if not self._order.is_shared:
            self._elsewhere.clear()
        now = time.monotonic()
        for model in models:
            if model in shared or not self._order.is_shared:
                self._start_some(model, sites[model], shared.get(model), now)

    async def close(self) -> None:
        """Redis is told that nobody waits here any more."""
        asks = [Ask(model or "", (), list(left)) for model, left in self._left.items()]
        if asks:
            await self._order.look(asks)
        await self._order.close()

    # The line.

    @contextlib.contextmanager
    def _place_in_line(self, ticket: Ticket) -> Iterator[asyncio.Future[Instance]]:
        """Given up on every way out: a client that leaves is in nobody's way."""
        if self._waiters >= self._limits.waiters_max:
            raise Overloaded("Too many requests are waiting. Try again later.", code="overloaded")
        if not ticket.has_waited:
            self._counters.add("requests_waited")
        ticket.has_waited = True
        ticket.chosen = asyncio.get_running_loop().create_future()
        self._lines.setdefault(ticket.model, {})[ticket.request_id] = ticket
        ticket.is_told &= self._left.get(ticket.model, {}).pop(ticket.request_id, None) is not None
        self._waiters += 1
        self._news.set()
        try:
            yield ticket.chosen
        finally:
            self._waiters -= 1
            line = self._lines[ticket.model]
            del line[ticket.request_id]
            if not line:
                del self._lines[ticket.model]
                self._yielded.pop(ticket.model, None)
            self._left.setdefault(ticket.model, {})[ticket.request_id] = time.monotonic()
            ticket.chosen.cancel()
            self._news.set()

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S if self._left else QUIET_S if self._lines else IDLE_S):
                await self._news.wait()
        self._news.clear()
        await self._look_elsewhere()

    async def _look_elsewhere(self) -> None:
        """For models that nobody waits for here: whether others wait, so that who comes here does not overtake them,
        and is not turned away for a line that is no more."""
        if self._binds_late and time.monotonic() - self._looked_elsewhere_at >= IDLE_S:
            self._looked_elsewhere_at = time.monotonic()
            lined = {model or "" for model in (*self._lines, *self._left)}
            others = [model for model in self._dispatcher.models() if model not in lined]
            kept = {model: count for model, count in self._elsewhere.items() if model in lined}
            self._elsewhere = kept | (await self._order.lengths(others) or {})

    def _check_time(self, ticket: Ticket, sites: Sequence[Site], now: float) -> None:
        if not ticket.is_open:
            return
        error: GatewayError | None = None
        if now - ticket.since >= self._limits.room_wait_s:
            error = Overloaded("No instance has had room for this request in time. Try again later.", code="overloaded")
        if any(one.instance_id not in ticket.exclude for one in sites):
            ticket.unusable_since = None
        elif ticket.unusable_since is None:
            ticket.unusable_since = now
        elif now - ticket.unusable_since >= self._limits.instance_wait_s:
            error = self._dispatcher.nobody_usable(ticket.model)
        if error is not None:
            assert ticket.chosen is not None
            ticket.chosen.set_exception(error)

    def _asks(
        self, models: Sequence[str | None], sites: dict[str | None, list[Site]], now: float
    ) -> dict[str | None, Ask]:
        """What Redis is asked and told: nothing of a line in which nothing has changed and nobody could start."""
        if not self._order.is_shared:
            self._left.clear()
            return {}
        renews = now - self._renewed_at >= keys.WAITING_RENEWAL_S
        if renews:
            self._renewed_at = now
        asks: dict[str | None, Ask] = {}
        for model in models:
            tickets = [one for one in self._lines.get(model, {}).values() if one.is_open]
            put = [one.entry(now) for one in tickets if renews or not one.is_told][:PUT_AT_ONCE]
            could_start = _one_could_start(tickets, sites[model], now)
            left = [one for one, since in self._left.get(model, {}).items() if now - since >= LEAVE_S]
            if put or left or could_start:
                asks[model] = Ask(model or "", put, left)
        return asks

    def _told(self, model: str | None, ask: Ask, line: Line) -> None:
        """Redis has answered."""
        tickets = self._lines.get(model, {})
        for entry in ask.put:
            if (ticket := tickets.get(entry.request_id)) is not None:
                ticket.is_told = True
        left = self._left.get(model, {})
        for request_id in ask.take_out:
            left.pop(request_id, None)
            if request_id in tickets:
                tickets[request_id].is_told = False  # It has come back meanwhile.
        if not left:
            self._left.pop(model, None)
        ours = sum(ticket.is_told for ticket in tickets.values()) + len(left)
        self._elsewhere[model or ""] = max(0, line.length - ours)

    def _start_some(self, model: str | None, sites: Sequence[Site], line: Line | None, now: float) -> None:
        own = self._lines.get(model, {})
        known = self._yielded.pop(model, {})
        stuck = {one: since for one, since in known.items() if now - since > YIELD_S}
        yielded = (
            {}
            if line is None
            else {one.request_id: stuck[one.request_id] for one in line.entries if one.request_id in stuck}
        )
        for allotment in allot(self._waiters_of(own, line, stuck, now), sites, self._rules):
            ticket = own.get(allotment.request_id)
            if ticket is None:
                yielded[allotment.request_id] = known.get(allotment.request_id, now)
            elif ticket.is_open and now >= ticket.not_before:
                instance = self._dispatcher.instance(allotment.instance_id)
                if instance is not None and ticket.chosen is not None:
                    ticket.chosen.set_result(instance)
        if yielded:
            self._yielded[model] = yielded

    def _waiters_of(
        self, own: dict[str, Ticket], line: Line | None, stuck: Collection[str], now: float
    ) -> list[Waiter]:
        """Those of all gateways, as far as they are to be looked at; without Redis our own.

        Ages of our own are by our own clock: Redis's include the time that each took to get there, and might turn two
        that came one right after the other.
        """
        if line is None:
            return [ticket.waiter(now) for ticket in own.values() if ticket.is_open]
        waiters: list[Waiter] = []
        for entry in line.entries:
            ticket = own.get(entry.request_id)
            if entry.gateway_id == self._order.own_id:
                if ticket is not None and ticket.is_open:  # Else it has just left.
                    waiters.append(ticket.waiter(now))
            elif entry.request_id not in stuck:
                is_protected = entry.priority_class in self._protected
                waited_s, tokens = entry.waited_s, entry.tokens
                waiters.append(
                    Waiter(entry.request_id, entry.priority_class, waited_s, tokens, is_protected=is_protected)
                )
        return waiters

    def _forget_telling(self) -> None:
        """Redis is back, perhaps empty."""
        for line in self._lines.values():
            for ticket in line.values():
                ticket.is_told = False

    def _note_wait(self, ticket: Ticket) -> None:
        if ticket.has_waited:
            waits = self._counters.distribution("wait_seconds", priority=ticket.priority_class.word)
            waits.observe(time.monotonic() - ticket.since)


def _one_could_start(tickets: Iterable[Ticket], sites: Iterable[Site], now: float) -> bool:
    """Whether it is worth asking who comes first: some instance has room for the smallest of ours."""
    least = min((ticket.tokens for ticket in tickets if now >= ticket.not_before), default=None)
    return least is not None and any(one.room.fits(one.demand_blocks(least)) for one in sites)
