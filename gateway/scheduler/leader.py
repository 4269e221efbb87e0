"""One tick: hold the lease, look, decide, act, publish.

The lease has a token, higher than that of every lease before it. Whatever is done in its name says it: Redis compares
it for what is written there, and an instance refuses orders of a lease that is older than the newest that it has heard
of. So a leader that stood still and does not know it yet changes nothing, and it knows it by its own clock, which goes
on while it stands still, and which nobody sets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable

from gateway.cluster.members import Members
from gateway.cluster.store import Lease, Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.policy.decide import Action, Memory, Pair, Policy, PolicySettings, decide
from gateway.scheduler.executor import Executor
from gateway.telemetry import Changes, log
from gateway.wire import FENCE_MAX

ACTS_SHARE = 0.3
"""The share of the lease that the actions of one tick may take: an instance that hangs must not cost the lease."""


class Leader:
    """Without Redis there is no lease, and without a lease nothing is moved by policy; requests go on as they are."""

    def __init__(
        self,
        gateway_id: str,
        store: Store,
        members: Members,
        executor: Executor,
        settings: PolicySettings,
        lease_s: float,
        counters: Counters,
        kept: Callable[[], Awaitable[frozenset[str]]],
    ) -> None:
        """``kept``: the instances that are kept for requests that wait, at whatever gateway."""
        self._kept = kept
        self._gateway_id = gateway_id
        self._store = store
        self._members = members
        self._executor = executor
        self._settings = settings
        self._lease_s = lease_s
        self._counters = counters
        self._lease: Lease | None = None
        self._memory = Memory()
        self._published = 0
        self._changes = Changes()
        self.on_action: Callable[[Action], None] = _nobody
        """Called for each decision that is no renewal, before it is carried out."""

    @property
    def lease(self) -> Lease | None:
        """``None`` while this gateway may not act as the leader."""
        return self._lease if self._lease is not None and time.monotonic() < self._lease.ends_at else None

    @property
    def is_leading(self) -> bool:
        return self.lease is not None

    async def tick(self) -> None:
        await self._hold_lease()
        lease = self.lease  # What was granted may have ended before this gateway came to read it.
        if lease is None:
            self._memory = Memory()
            return
        began_at = time.monotonic()
        before = self._memory
        kept_ids = await self._kept() if self._settings.policy is Policy.KVFERRY else frozenset[str]()
        view = dataclasses.replace(self._members.view(time.monotonic()), kept_ids=kept_ids)
        actions, self._memory = decide(view, before, time.monotonic(), self._settings)
        for action in actions:
            self._say(action, before)
        acts_at = time.monotonic()
        await self._act(actions, lease)
        acted_s = time.monotonic() - acts_at
        await self._publish(lease)
        took_s = time.monotonic() - began_at
        self._counters.distribution("leader_tick_seconds").observe(took_s)
        self._counters.distribution("leader_work_seconds").observe(took_s - acted_s)

    async def _act(self, actions: list[Action], lease: Lease) -> None:
        """At once, so that one that hangs delays none of the others; never past the lease's end by our own clock."""
        left_s = min(lease.ends_at - time.monotonic(), self._lease_s * ACTS_SHARE)
        if left_s <= 0:
            return
        try:
            async with asyncio.timeout(left_s):
                await asyncio.gather(*(self._executor.run(action, lease.token) for action in actions))
        except TimeoutError:
            self._changes("leader_actions", "late", level=logging.WARNING)
        else:
            self._changes("leader_actions", "in time")

    async def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            try:
                await self._store.drop_lease(lease)
            except StoreUnavailable:
                return  # It ends by itself.

    async def _hold_lease(self) -> None:
        previous, reason = self._lease, "another gateway leads"
        try:
            self._lease = await self._store.take_lease(self._gateway_id, self._lease_s, self._seen())
        except StoreUnavailable as error:
            self._lease, reason = None, error.message
        if self._lease is None and previous is not None:
            log("leader_lost", level=logging.WARNING, gateway=self._gateway_id, token=previous.token, reason=reason)
        if self._lease is not None and (previous is None or previous.token != self._lease.token):
            log("leader", gateway=self._gateway_id, token=self._lease.token)
            self._memory = Memory()

    def _seen(self) -> int:
        """The highest token that any instance has had an order of: Redis may have lost its count."""
        reports = [member.report for member in self._members.all() if member.report is not None]
        return max((report.fence for report in reports if 0 <= report.fence <= FENCE_MAX), default=0)

    async def _publish(self, lease: Lease) -> None:
        reports = [member.report for member in self._members.all() if member.report is not None]
        self._published += 1
        try:
            written = await self._store.publish_snapshot(
                lease, {"token": lease.token, "reports": reports}, self._published
            )
        except StoreUnavailable as error:
            self._changes("snapshot", "not written", reason=error.message, level=logging.WARNING)
            return
        self._changes("snapshot", "written" if written else "refused: the lease has passed on")
        if not written and self._lease == lease:
            self._lease = None

    def _say(self, action: Action, before: Memory) -> None:
        """One line a decision; a renewal is none."""
        if isinstance(action, Pair) and before.pairs.get(action.source_id) == action.destination_id:
            return
        self._counters.add("leader_actions", action=type(action).__name__.lower())
        log("decide", action=action)
        self.on_action(action)


def _nobody(action: Action) -> None:
    pass
