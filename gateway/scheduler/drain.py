"""Empties instances that are draining: every request that can move is ordered to move, again and again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway import wire
from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Instance, Members
from gateway.counters import Counters
from gateway.errors import LlumletRefused, LlumletTimeout, LlumletUnreachable
from gateway.policy.dispatch import Sent, choose_instance
from gateway.scheduler.executor import Executor
from gateway.telemetry import cancel_all, log

MOVES_AT_ONCE_MAX = 4
"""A llumlet refuses more, in or out."""
RETRY_S = 0.5
"""Before a request whose move has failed is ordered to move again."""
NO_DESTINATION = "no other instance can take it"
_MOVING = ("migrating", "parked")
"""Out, by the leader's policy, or in: another order would only be refused."""


@dataclass(slots=True)
class Progress:
    """``failed``: orders that did not end in a move; they are given again. ``remaining``: what the last look found."""

    empty: bool = False
    moved: int = 0
    failed: int = 0
    remaining: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Emptying:
    """One instance's, for as long as someone waits for it."""

    source: Instance
    progress: Progress = field(default_factory=Progress)
    task: asyncio.Task[None] | None = None
    waiters: int = 0
    fence: int | None = None
    """The leader's lease, where it is only the leader who wants it."""
    moves: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    """By destination: moves under way, which its report does not know of."""
    rests_until: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why the last order of a request has failed."""


class Drains:
    """``in_flight``: this gateway's own requests at an instance, some of which may not have reached its engine yet."""

    def __init__(
        self,
        members: Members,
        llumlets: LlumletClient,
        executor: Executor,
        in_flight: Callable[[str], int],
        look_s: float,
        counters: Counters,
    ) -> None:
        self._members = members
        self._llumlets = llumlets
        self._executor = executor
        self._in_flight = in_flight
        self._look_s = look_s
        self._counters = counters
        self._emptyings: dict[str, _Emptying] = {}
        self._own: dict[str, asyncio.Task[None]] = {}

    async def drain(self, instance: Instance, timeout_s: float) -> Progress:
        """Nothing is sent there from now on; answers when it is empty, or at the end of the time.

        It stays draining in any case. Raises what the llumlet's client does.
        """
        self._members.drain_ordered(instance.instance_id, True)
        try:
            await self._llumlets.drain(instance.url, True)
        except (LlumletRefused, LlumletUnreachable):
            self._members.drain_ordered(instance.instance_id, False)
            raise
        log("drain", instance=instance.instance_id, timeout_s=timeout_s)
        if (begun := self._emptyings.get(instance.instance_id)) is not None:
            begun.fence = None  # From now on an operator wants it, whoever leads.
        return await self._empty(instance, timeout_s)

    async def undrain(self, instance: Instance) -> None:
        """Requests that are moving away arrive; those that are not stay. Whoever waits for the drain is answered."""
        await self._llumlets.drain(instance.url, False)
        self._members.drain_ordered(instance.instance_id, False)
        emptying = self._emptyings.get(instance.instance_id)
        if emptying is not None and emptying.task is not None:
            emptying.task.cancel()
        log("undrain", instance=instance.instance_id)

    async def follow(self, fence: int | None) -> None:
        """The leader's round: an instance may begin to drain by itself, as a server does that is told to end.

        ``fence``: the token of this gateway's lease; ``None`` while it does not lead.
        """
        self._own = {instance_id: task for instance_id, task in self._own.items() if not task.done()}
        if fence is None:
            await self.stop()
            return
        for emptying in self._emptyings.values():
            if emptying.fence is not None:
                emptying.fence = fence
        for member in self._members.all():
            instance, report = member.instance, member.report
            if report is None or not report.draining or not member.healthy or instance.instance_id in self._emptyings:
                continue
            if report.requests_running + report.requests_waiting > 0:
                self._own[instance.instance_id] = asyncio.create_task(self._empty_unasked(instance, fence))

    async def stop(self) -> None:
        """Ends what the leader has begun by itself."""
        await cancel_all(self._own.values())
        self._own.clear()

    async def _empty_unasked(self, instance: Instance, fence: int) -> None:
        try:
            progress = await self._empty(instance, None, fence)
            log("drained", instance=instance.instance_id, moved=progress.moved, failed=progress.failed)
        except (LlumletRefused, LlumletUnreachable) as error:
            log("drain_failed", level=logging.WARNING, instance=instance.instance_id, reason=error.message)

    async def _empty(self, source: Instance, timeout_s: float | None, fence: int | None = None) -> Progress:
        """However many wait, one loop works for them, until the last has gone."""
        emptying = self._emptyings.get(source.instance_id)
        if emptying is None:
            emptying = self._emptyings[source.instance_id] = _Emptying(source, fence=fence)
            emptying.task = asyncio.create_task(self._work(emptying))
        task = emptying.task
        assert task is not None
        emptying.waiters += 1
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if task.done() and not task.cancelled():
                task.result()
            return emptying.progress
        finally:
            emptying.waiters -= 1
            if emptying.waiters == 0:
                self._forget(emptying)
                task.cancel()

    async def _work(self, emptying: _Emptying) -> None:
        """Ends when the instance is empty, or no longer draining, or another life of it has begun."""
        was_empty = was_draining = False
        try:
            while True:
                try:
                    status = await self._llumlets.status(emptying.source.url)
                except LlumletTimeout:  # In the middle of a long step.
                    await asyncio.sleep(self._look_s)
                    continue
                is_same = status.report.boot_id == emptying.source.boot_id
                if not is_same or (was_draining and not status.report.draining):
                    return
                was_draining = status.report.draining
                is_empty = self._is_empty(emptying.source, status)
                if is_empty and was_empty:  # Twice, for a request may be between two places.
                    emptying.progress.empty = True
                    return
                was_empty = is_empty
                self._order_moves(emptying, status.requests)
                emptying.progress.remaining = [_remaining(emptying, request) for request in status.requests]
                await asyncio.sleep(self._look_s)
        finally:
            self._forget(emptying)
            for move in emptying.moves.values():
                move.cancel()  # The llumlet finishes what it has begun.

    def _forget(self, emptying: _Emptying) -> None:
        if self._emptyings.get(emptying.source.instance_id) is emptying:
            del self._emptyings[emptying.source.instance_id]

    def _is_empty(self, source: Instance, status: wire.Status) -> bool:
        running = status.report.requests_running + status.report.requests_waiting
        return not status.requests and running == 0 and self._in_flight(source.instance_id) == 0

    def _order_moves(self, emptying: _Emptying, requests: list[wire.RequestStatus]) -> None:
        for request in requests:
            if len(emptying.moves) >= MOVES_AT_ONCE_MAX:
                return
            if not request.movable or request.state in _MOVING or request.request_id in emptying.moves:
                continue
            if time.monotonic() < emptying.rests_until.get(request.request_id, -math.inf):
                continue
            destination = self._destination(emptying)
            if destination is None:
                emptying.reasons[request.request_id] = NO_DESTINATION
                continue
            move = self._move(emptying, request.request_id, destination)
            emptying.moves[request.request_id] = asyncio.create_task(move)

    def _destination(self, emptying: _Emptying) -> Instance | None:
        """The freest that serves all that the source does; one that can take its KV as it is comes first."""
        view = self._members.view(time.monotonic())
        source = next((one for one in view.instances if one.instance_id == emptying.source.instance_id), None)
        if source is None:
            return None
        sent = {instance_id: Sent(requests) for instance_id, requests in emptying.sent.items()}
        unfit = {
            one.instance_id
            for one in view.instances
            if one is source or not one.managed or not one.can_take_over_from(source)
        }
        other = {one.instance_id for one in view.instances if not one.can_take_kv_from(source)}
        chosen = choose_instance(view, None, sent, unfit | other) or choose_instance(view, None, sent, unfit)
        return None if chosen is None else self._members.get(chosen)

    async def _move(self, emptying: _Emptying, request_id: str, destination: Instance) -> None:
        emptying.sent[destination.instance_id] += 1
        try:
            result = await self._executor.migrate(emptying.source, request_id, destination, fence=emptying.fence)
            reason = None if result.outcome == "committed" else result.reason or "the move was given up"
        except (LlumletRefused, LlumletUnreachable) as error:
            reason = error.message
        finally:
            emptying.sent[destination.instance_id] -= 1
            del emptying.moves[request_id]
        if reason is None:
            emptying.progress.moved += 1
            self._counters.add("drain_moves")
        else:
            emptying.progress.failed += 1
            emptying.reasons[request_id] = reason
            emptying.rests_until[request_id] = time.monotonic() + RETRY_S


def _remaining(emptying: _Emptying, request: wire.RequestStatus) -> dict[str, Any]:
    if request.request_id in emptying.moves:
        reason: str | None = "it is moving"
    else:
        reason = request.reason or emptying.reasons.get(request.request_id)
    return {"request": request.request_id, "state": request.state, "reason": reason}
