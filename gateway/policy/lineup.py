"""The usable instances that serve one model, prepared: of hundreds of them the best is found without looking into each.

The rules are those of ``dispatch.py`` and ``waiting.py``, and a test holds the answers to theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gateway.policy.dispatch import Rank
from gateway.policy.view import InstanceView, ModelGroup
from gateway.policy.waiting import Site, Waiter, best_site


@dataclass(frozen=True, slots=True)
class Standing:
    """What an instance is worth to the next request, until it reports or something is sent there."""

    view: InstanceView
    rank: Rank
    queue_length: int
    in_flight: int
    """This gateway's own requests there."""
    is_full: bool
    """No more of them may be."""
    site: Site


class Lineup:
    def __init__(self, standings: Iterable[Standing] = ()) -> None:
        self._standings: dict[str, Standing] = {}
        self._ranks: dict[str, Rank] = {}
        self._open_sites: dict[str, tuple[float, str]] = {}
        self._queues: dict[str, int] = {}
        self._site_queues: dict[str, int] = {}
        self._load_unknown: set[str] = set()
        for standing in standings:
            self.put(standing)

    def __len__(self) -> int:
        return len(self._standings)

    def put(self, standing: Standing) -> None:
        """In place of the instance's last one."""
        instance_id, site = standing.view.instance_id, standing.site
        self._standings[instance_id] = standing
        self._queues[instance_id], self._site_queues[instance_id] = standing.queue_length, site.queued
        if standing.is_full:
            self._ranks.pop(instance_id, None)
        else:
            self._ranks[instance_id] = standing.rank
        if site.is_open:
            self._open_sites[instance_id] = -site.freeness_steps, instance_id
        else:
            self._open_sites.pop(instance_id, None)
        if not standing.view.load_known:
            self._load_unknown.add(instance_id)
        elif self._load_unknown:
            self._load_unknown.discard(instance_id)

    def drop(self, instance_id: str) -> None:
        if self._standings.pop(instance_id, None) is not None:
            del self._queues[instance_id], self._site_queues[instance_id]
            self._ranks.pop(instance_id, None)
            self._open_sites.pop(instance_id, None)
            self._load_unknown.discard(instance_id)

    def only(self, exclude: Collection[str], group: ModelGroup | None = None) -> Lineup:
        """Itself where all may be taken, which is usual."""
        if group is None and not any(instance_id in self._standings for instance_id in exclude):
            return self
        return Lineup(
            one
            for instance_id, one in self._standings.items()
            if instance_id not in exclude and (group is None or group in one.view.groups)
        )

    def best(self) -> str | None:
        """As ``choose_instance``."""
        return min(self._ranks.values())[-1] if self._ranks else None

    def best_protecting(self, tokens: int) -> str | None:
        """As ``choose_protecting``."""
        free = [
            (one.site.free_blocks * one.site.block_size, instance_id)
            for instance_id in self._ranks
            if (one := self._standings[instance_id]).site.protects
        ]
        return min(((left, instance_id) for left, instance_id in free if left >= tokens), default=(0.0, None))[1]

    @property
    def load_unknown(self) -> list[Standing]:
        return [self._standings[instance_id] for instance_id in sorted(self._load_unknown)]

    @property
    def queued(self) -> int:
        return sum(self._queues.values())

    @property
    def is_full(self) -> bool:
        return not self._ranks

    # Where requests wait at the gateways.

    def sites(self) -> list[Site]:
        return [one.site for one in self._standings.values()]

    @property
    def says_room(self) -> bool:
        return any(one.site.says_room for one in self._standings.values())

    @property
    def queued_at_sites(self) -> int:
        return sum(self._site_queues.values())

    def best_site(self, waiter: Waiter) -> Site | None:
        """The freest of all that are open has room more often than not; else each is looked at. The instances that are
        not for ``waiter`` have been left out (:meth:`only`)."""
        if not self._open_sites:
            return None
        freest = self._standings[min(self._open_sites.values())[1]].site
        if not waiter.is_protected and freest.room.fits(freest.demand_blocks(waiter.tokens)):
            return freest
        return best_site(waiter, (self._standings[instance_id].site for instance_id in self._open_sites))
