"""Late binding: a request goes to an instance only when it can be started there now. Who of those that wait goes where.

The instance applies :func:`room` to what its engine holds at this very step, and is the authority. A gateway applies
:func:`allot` to the last reports, so that a stale view costs a retry and never an overload. Pure: no clock, no I/O,
ties by id; several gateways that see the same come to the same result, and each acts on its own requests alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.policy.dispatch import Sent, queue_length
from gateway.policy.usage import freeness_steps
from gateway.policy.view import InstanceView

GROWTH_TOKENS = 16
"""Steps that every running request must be able to go on after a newcomer has its prompt; else the newcomer's place is
soon paid for by a preemption."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an instance can still start: a prompt of so many KV blocks, as long as there is a place in the batch."""

    blocks: int
    places: int

    def fits(self, blocks: int) -> bool:
        return self.places > 0 and blocks <= self.blocks


def room(
    blocks_free: int, blocks_promised: int, batch: int, batch_max: int, growth_tokens: int, block_size: int
) -> Room:
    """``blocks_promised``: to prompts of which only a part is computed, and to requests that are queued before.

    ``batch``: those that run, and those. An empty instance gives all that it has, or a prompt of nearly the size of its
    memory would never start anywhere.
    """
    places = max(0, batch_max - batch)
    if batch == 0:
        return Room(blocks_free, places)
    growth_blocks = -(-growth_tokens * (batch + 1) // block_size)
    return Room(max(0, blocks_free - blocks_promised - growth_blocks), places)


@dataclass(frozen=True, slots=True)
class Site:
    """An instance as a place to start at. ``free_blocks`` and ``batch`` make its freeness."""

    instance_id: str
    room: Room
    block_size: int
    blocks_total: int
    """0: not known, and any prompt fits."""
    free_blocks: float
    batch: int
    queued: int = 0
    """Requests that wait there, in its own queue."""
    says_room: bool = True
    """By its own word; else it is taken to have room until it is full."""
    protects: bool = False
    """Of its room a part is headroom, for a request that runs there: ``free_blocks`` may be negative by that."""

    @property
    def freeness_steps(self) -> float:
        """Of one that has too little, more load is not shared out: it would make it look freer."""
        batch = self.batch if self.free_blocks > 0 else 1
        return freeness_steps(0, -self.free_blocks, batch, self.block_size)

    @property
    def is_open(self) -> bool:
        """Whether the smallest prompt could start here."""
        return self.room.places > 0 and (self.room.blocks > 0 or self.blocks_total == 0)

    def demand_blocks(self, tokens: int) -> int:
        """No prompt that the instance takes at all is larger than its memory, whatever was guessed."""
        return min(max(1, -(-tokens // self.block_size)), self.blocks_total)

    def taken(self, tokens: int) -> Site:
        """With one more request there."""
        blocks = self.demand_blocks(tokens)
        room = Room(self.room.blocks - blocks, self.room.places - 1)
        return dataclasses.replace(self, room=room, free_blocks=self.free_blocks - blocks, batch=self.batch + 1)


PLACES_UNKNOWN = 1 << 30


def site(instance: InstanceView, sent: Sent) -> Site:
    """From its last report, less what this gateway has sent since. One that does not say what it has room for (without
    the plugin) takes requests as long as it is not full and nothing waits there."""
    sent_blocks = sent.tokens / instance.block_size
    usage = instance.virtual_usage_blocks - instance.head_of_line_blocks + instance.queued_blocks + sent_blocks
    batch = instance.requests_running + instance.requests_waiting + sent.requests
    free = instance.blocks_total - usage
    if instance.room_blocks is None:
        queued = queue_length(instance, sent)
        is_open = not instance.load_known or (free > 0 and queued == 0)
        open_room = Room(0, PLACES_UNKNOWN if is_open else 0)
        return Site(
            instance.instance_id,
            open_room,
            instance.block_size,
            0,
            free,
            batch,
            queued,
            says_room=False,
            protects=instance.protects,
        )
    blocks = instance.room_blocks - (-(-sent.tokens // instance.block_size))
    left = Room(blocks, instance.room_places - sent.requests)
    queued = instance.requests_waiting  # Nothing is sent there to wait, so what is on its way does not count.
    return Site(
        instance.instance_id,
        left,
        instance.block_size,
        instance.blocks_total,
        free,
        batch,
        queued,
        protects=instance.protects,
    )


@dataclass(frozen=True, slots=True)
class Waiter:
    """``rank``: its class, lower is sooner. ``tokens``: of its prompt, as far as known."""

    request_id: str
    rank: int
    waited_s: float
    tokens: int
    exclude: frozenset[str] = frozenset()
    """Instances that it is not to be sent to."""
    is_protected: bool = False
    """Its class has headroom wherever it runs."""


@dataclass(frozen=True, slots=True)
class WaitingRules:
    aged_s: float = 30.0
    """After this time the one that has waited longest comes first, and an instance is kept for it."""


@dataclass(frozen=True, slots=True)
class Allotment:
    request_id: str
    instance_id: str


def ordered(waiters: Iterable[Waiter], rules: WaitingRules) -> list[Waiter]:
    """By class, then by age; before all of them the oldest one of any class, once it has aged."""
    line = sorted(waiters, key=lambda one: (one.rank, -one.waited_s, one.request_id))
    oldest = min(line, key=lambda one: (-one.waited_s, one.request_id), default=None)
    if oldest is not None and oldest.waited_s >= rules.aged_s:
        line.remove(oldest)
        line.insert(0, oldest)
    return line


def allot(waiters: Sequence[Waiter], sites: Iterable[Site], rules: WaitingRules) -> list[Allotment]:
    """First fit: who comes first is served first if it fits anywhere, and does not hold up those behind it if not.

    Each goes to the freest instance among those with room. When the aged first one fits nowhere, the instance that is
    nearest to having room for it takes nobody else. That is the one with most room, so it stays the same one: nothing
    comes to it any more, and what ends there makes it larger still.

    Room only shrinks meanwhile, so what is not smaller than one that has fit nowhere is passed by without a look: under
    overload the large ones gather at the front, hundreds of them, and must not hold up the small ones behind.
    """
    sites = list(sites)
    open_sites = {one.instance_id: one for one in sites if one.is_open}
    allotted: list[Allotment] = []
    too_large_tokens = math.inf
    for index, waiter in enumerate(ordered(waiters, rules)):
        if not open_sites:
            break
        if waiter.tokens >= too_large_tokens:
            continue
        chosen = best_site(waiter, open_sites.values())
        if chosen is not None:
            open_sites[chosen.instance_id] = taken = chosen.taken(waiter.tokens)
            if not taken.is_open:
                del open_sites[chosen.instance_id]
            allotted.append(Allotment(waiter.request_id, chosen.instance_id))
            continue
        if index == 0 and waiter.waited_s >= rules.aged_s:
            open_sites.pop(_kept_for(waiter, sites), None)
        if not waiter.exclude:
            too_large_tokens = waiter.tokens
    return allotted


def best_site(waiter: Waiter, sites: Iterable[Site]) -> Site | None:
    fitting = [
        one
        for one in sites
        if one.instance_id not in waiter.exclude and one.room.fits(one.demand_blocks(waiter.tokens))
    ]
    if waiter.is_protected:
        # Where there is headroom already it costs no other instance as much again; the fullest, so that few keep it.
        joined = [one for one in fitting if one.protects and one.free_blocks >= one.demand_blocks(waiter.tokens)]
        if joined:
            return min(joined, key=lambda one: (one.free_blocks, one.instance_id))
    return min(fitting, key=lambda one: (-one.freeness_steps, one.instance_id), default=None)


def kept_instance(waiters: Iterable[Waiter], sites: Iterable[Site], rules: WaitingRules) -> str | None:
    """The one that takes nobody else now: the aged first one fits nowhere."""
    first = next(iter(ordered(waiters, rules)), None)
    sites = list(sites)
    if first is None or first.waited_s < rules.aged_s or best_site(first, sites) is not None:
        return None
    return _kept_for(first, sites) or None


def _kept_for(waiter: Waiter, sites: Iterable[Site]) -> str:
    able = [one for one in sites if one.instance_id not in waiter.exclude]
    return min(able, key=lambda one: (-one.room.blocks, -one.room.places, one.instance_id)).instance_id if able else ""
