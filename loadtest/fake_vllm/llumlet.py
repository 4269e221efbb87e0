"""A fake's llumlet: reports, pairings and managed requests, and both sides of a migration."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiohttp

from gateway import wire
from gateway.policy.picking import Movable
from loadtest.fake_vllm.arrivals import Arrival, Arrivals, contents_fetcher
from loadtest.fake_vllm.departures import Departure
from loadtest.fake_vllm.instance import Instance, Reply
from loadtest.sim.admission import judge
from loadtest.sim.engine import State
from loadtest.sim.reports import Identity, make_report
from vllm_plugin.handshake import Destination, Fence, Peer, Refused
from vllm_plugin.pairing import Paired
from vllm_plugin.settings import MIGRATIONS_OUT_MAX, REPORT_INTERVAL_S

logger = logging.getLogger("kvferry.fake")


class NoSuchRequest(Exception):
    """No managed request of that id is here."""


class Llumlet:
    def __init__(
        self, instance: Instance, identity: Identity, secret: str, http: aiohttp.ClientSession, agent: tuple[str, int]
    ) -> None:
        """``agent``: host and port at which peers fetch KV blocks from here."""
        self.instance = instance
        self.identity = identity
        self.secret = secret
        self.draining = False
        self._engine = instance.engine
        self._http = http
        self._agent = agent
        copy_s = instance.engine.profile.copy_s(instance.engine.settings.block_size)
        self.arrivals = Arrivals(instance, identity.kv_format, contents_fetcher(http, secret, copy_s))
        self._sessions: dict[str, Reply] = {}
        self._departures: dict[str, Departure] = {}
        self._arrived: dict[str, Arrival] = {}
        """How those have come that did not begin here."""
        self.migrations_ended = wire.MigrationTotals()
        self._fence = Fence()
        self._paired = Paired()
        self._line = b""
        self._readers = 0
        self._sequence = 0
        self._reported = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Llumlet {self.identity.instance_id} {len(self._sessions)} sessions, {len(self._departures)} out>"

    # Managed requests.

    def why_busy(self, reply: Reply) -> wire.Busy | None:
        """Why a request that is to start now or not at all cannot; ``None``: it is to be submitted at once."""
        if self.instance.faults.busy or self.draining:
            return wire.Busy(None, 0, 0)
        return judge(self._engine, reply.request)

    def open_session(self, reply: Reply, resume_id: str | None) -> Arrival | None:
        """For one request of a gateway. Raises Refused if nothing is known under ``resume_id``."""
        arrival = self.arrivals.claim(resume_id, reply) if resume_id is not None else None
        self._sessions[reply.request_id] = reply
        if arrival is not None:
            self._arrived[reply.request_id] = arrival
        return arrival

    def close_session(self, reply: Reply, arrival: Arrival | None) -> None:
        if self._sessions.get(reply.request_id) is reply:
            del self._sessions[reply.request_id]
            self._arrived.pop(reply.request_id, None)
        if arrival is not None:
            self.arrivals.unclaim(arrival)

    # Migrations out.

    async def migrate(self, order: wire.MigrateOrder) -> wire.MigrationResult:
        """Raises NoSuchRequest, or Refused with why it cannot move."""
        self._fence.check(order.fence)
        reply = self._sessions.get(order.request_id)
        if reply is None:
            raise NoSuchRequest(order.request_id)
        if order.destination_id == self.identity.instance_id:
            raise Refused("the destination is the source")
        if order.request_id in self._departures:
            raise Refused("the request is moving already")
        if len(self._departures) >= MIGRATIONS_OUT_MAX:
            raise Refused("too many requests are moving already")
        if self._engine.get(reply.request.request_id) is not reply.request:
            raise Refused("the request cannot move: it has not started, or has finished")
        departure = Departure(
            self.instance,
            reply,
            self.identity.instance_id,
            Destination(order.destination_id, order.destination_url),
            self._peer,
            self.identity.kv_format,
            self._agent,
            order.method,
            self._moves(order.request_id),
        )
        self._departures[order.request_id] = departure
        # It goes on when whoever ordered it goes away.
        return await asyncio.shield(self._spawn(self._run(departure)))

    async def _run(self, departure: Departure) -> wire.MigrationResult:
        try:
            result = await departure.run()
        finally:
            del self._departures[departure.reply.request_id]
        self.migrations_ended = self.migrations_ended.plus(result)
        logger.info("migrate %s", result)
        return result

    def _peer(self, destination: Destination, migration_id: str) -> Peer:
        return Peer(self._http, self.secret, destination, migration_id)

    def block_contents(self, token: str, blocks: list[int]) -> list[int | None]:
        """What a peer fetches; raises Refused unless a migration has granted it."""
        if all(departure.read_token != token for departure in self._departures.values()):
            raise Refused("no migration gives these blocks away")
        if not all(0 <= block < self._engine.settings.blocks_total for block in blocks):
            raise Refused("there are no such blocks")
        contents = [self._engine.pool.content(block) for block in blocks]
        if self.instance.faults.bad_blocks:
            return [content ^ 1 if content is not None else None for content in contents]
        return contents

    def pair(self, pairing: wire.Pairing | None, fence: int | None = None) -> None:
        """The leader's lease: move requests to that destination until it lapses. Raises Refused."""
        self._fence.check(pairing.fence if pairing is not None else fence)
        self._paired.set(pairing, time.monotonic())

    def _follow_pairing(self) -> None:
        now = time.monotonic()
        if places := self._paired.places(len(self._departures), now):
            for order in self._paired.choose(self._movable(now), places, draining=self.draining):
                self._spawn(self._try_migrate(order))

    def _movable(self, now: float) -> list[Movable]:
        return [
            self._paired.movable(
                request_id,
                reply.request.priority,
                reply.request.total_tokens,
                is_running=reply.request.state is State.RUNNING,
                moves=self._moves(request_id),
                settled_s=self._settled_s(request_id, now),
            )
            for request_id, reply in self._sessions.items()
            if reply.request.state in (State.RUNNING, State.WAITING) and request_id not in self._departures
        ]

    def _moves(self, request_id: str) -> int:
        arrival = self._arrived.get(request_id)
        return arrival.moves if arrival is not None else 0

    def _settled_s(self, request_id: str, now: float) -> float | None:
        arrival = self._arrived.get(request_id)
        return now - arrival.started_at if arrival is not None and arrival.started_at is not None else None

    async def _try_migrate(self, order: wire.MigrateOrder) -> None:
        try:
            committed = (await self.migrate(order)).outcome == "committed"
        except (Refused, NoSuchRequest):
            committed = False
        if not committed and order.request_id in self._sessions:
            self._paired.rest(time.monotonic())

    # Reports.

    def report(self) -> wire.Report:
        self._sequence += 1
        return make_report(
            self._engine,
            self.identity,
            self._sequence,
            draining=self.draining,
            migrations_in=self.arrivals.copying(),
            migrations_out=len(self._departures),
            migrations_ended=self.migrations_ended,
            fence=self._fence.newest,
            full=self.instance.faults.busy,
        )

    def status(self) -> wire.Status:
        parked = {arrival.request_id for arrival in self.arrivals.parked()}
        requests = [self._request(reply, parked) for reply in self._sessions.values() if _is_here(reply, parked)]
        return wire.Status(self.report(), requests)

    def _request(self, reply: Reply, parked: set[str]) -> wire.RequestStatus:
        request = reply.request
        state = "parked" if reply.request_id in parked else _STATES[request.state]
        reason = None if state in ("running", "waiting") else f"it is {state}"
        return wire.RequestStatus(
            request_id=reply.request_id,
            state=state,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            blocks=len(request.blocks),
            movable=reason is None,
            reason=reason,
        )

    async def reports(self) -> AsyncIterator[bytes]:
        """One JSON line each, from now on, the newest at once."""
        self._readers += 1
        try:
            yield self._make_line()
            while True:
                async with self._reported:
                    await self._reported.wait()
                yield self._line
        finally:
            self._readers -= 1

    async def run(self, delay_s: float) -> None:
        """Reports, pairing and leases, for as long as the server lives; ``delay_s``: not all at the same moment."""
        await asyncio.sleep(delay_s)
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self.instance.unless_hanging()
            if self._readers:
                self._line = self._make_line()
                async with self._reported:
                    self._reported.notify_all()
            self._follow_pairing()
            self.arrivals.expire()
            due = max(due + REPORT_INTERVAL_S, loop.time())
            await asyncio.sleep(due - loop.time())

    def _make_line(self) -> bytes:
        """Without the copy that ``to_json`` makes: with hundreds of instances it is most of what they cost."""
        report = self.report()
        fields = {name: getattr(report, name) for name in report.__slots__}
        fields["migrations_ended"] = self.migrations_ended.to_json()
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    async def empty(self, timeout_s: float) -> None:
        """As the plugin before its server ends: wait for a gateway to move what is here, as long as one listens."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self._sessions and self._readers and time.monotonic() < deadline:
            await asyncio.sleep(REPORT_INTERVAL_S)

    def kill(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_STATES = {
    State.NEW: "waiting",
    State.WAITING: "waiting",
    State.RUNNING: "running",
    State.FROZEN: "migrating",
    State.ENDED: "finished",
}


def _is_here(reply: Reply, parked: set[str]) -> bool:
    return reply.request_id in parked or reply.request.state not in (State.NEW, State.ENDED)
