"""The llumlet: kvferry's agent in one vLLM server (paper, section 4.1). Lives in the API server's event loop.

It reports the instance's load, answers the handshake of migrations that come in, runs those that go out (one that was
ordered, or what a pairing with a destination lets it choose), and knows every managed request by its gateway's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway import wire
from gateway.policy.picking import Movable
from gateway.policy.usage import RequestUsage, freeness_steps, virtual_usage_blocks
from vllm_plugin import __version__, compat, metrics
from vllm_plugin.handshake import Commit, Destination, Fence, Peer, Refused, Reserve, Stage, read_agents
from vllm_plugin.incoming import Incoming
from vllm_plugin.outgoing import Migration
from vllm_plugin.pairing import Paired, counted_moves
from vllm_plugin.session import Session
from vllm_plugin.settings import (
    COMMIT_TIMEOUT_S,
    MIGRATIONS_IN_MAX,
    MIGRATIONS_OUT_MAX,
    PREBIND_WAIT_S,
    REPORT_INTERVAL_S,
    RESUMES_MAX,
    STAGE_TIMEOUT_S,
    Settings,
)
from vllm_plugin.transfer import AgentClient, TransferError
from vllm_plugin.uncopied import RESTS_S, Uncopied

logger = logging.getLogger("vllm.kvferry.llumlet")

ABORTED_KEPT = 256
REPLAY_POLL_S = 0.002


class NoSuchRequest(Exception):
    """No managed request of that id is here."""


@dataclass(frozen=True)
class Data:
    """The data plane of this instance, as its workers described it."""

    agents: list[AgentClient]
    kv_format: str | None
    kv_reason: str | None


class Llumlet:
    """Built once a server, in ``KvferryEndpoints.init_state``."""

    def __init__(
        self,
        settings: Settings,
        instance_id: str,
        models: list[str],
        engine_client: Any,
        description: dict[str, Any],
        data: Data,
        parses_chats: bool,
    ) -> None:
        self.settings = settings
        self.instance_id = instance_id
        self.boot_id = secrets.token_hex(8)
        self.draining = False
        self._models = models
        self._engine_client = engine_client
        self._description = description
        self._data = data
        self._parses_chats = parses_chats
        self._sessions: dict[str, Session] = {}
        self._incoming: dict[str, Incoming] = {}
        self._outgoing: dict[str, Migration] = {}
        self._aborted: deque[str] = deque(maxlen=ABORTED_KEPT)
        self._paired = Paired()
        self._fence = Fence()
        self._report: wire.Report | None = None
        self._reported = asyncio.Condition()
        self._staying: Counter[str] = Counter()
        """Of the engine's counts of requests that cannot move, those that are on the metrics page."""
        self._migrations_ended = wire.MigrationTotals()
        self._uncopied = Uncopied()
        self._readers = 0
        """Gateways that read the reports now."""
        self._sequence = 0
        self._ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._http: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return (
            f"<Llumlet {self.instance_id} {len(self._sessions)} sessions, "
            f"{len(self._incoming)} in, {len(self._outgoing)} out>"
        )

    async def engine(self, operation: str, **payload: Any) -> Any:
        """The engine agent's operation of that name; waits for the step under way."""
        return await compat.call_engine(self._engine_client, operation, payload)

    def start(self) -> None:
        self._http = aiohttp.ClientSession(trust_env=False)
        self._spawn(self._tick_forever())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        for agent in self._data.agents:
            agent.close()

    # Managed requests.

    def why_full(self) -> wire.Busy | None:
        """At the last report, which is at most one interval and one engine step old, there was not room for the
        smallest prompt. Asked before the prompt is read: this refusal costs no tokenization and no engine. The gateway
        knows the same report, so it hardly ever sends a request that is refused here."""
        report = self._report
        if report is None or report.room_blocks is None or (report.room_blocks > 0 and report.room_places > 0):
            return None
        return wire.Busy(None, report.room_blocks, report.room_places)

    def open_session(
        self, request_id: str, resume_id: str | None, *, is_chat: bool, starts_now: bool = False
    ) -> Session:
        """For one HTTP request of a gateway. Raises Refused if nothing is known under ``resume_id``.

        ``starts_now``: it is to start at once or not at all. A resume is not asked that: its blocks are reserved, or it
        was running and has to go on somewhere.
        """
        incoming = None
        if resume_id is not None:
            incoming = self._incoming.get(resume_id)
            if incoming is None or incoming.closed or incoming.session is not None:
                raise Refused("nothing is known under this resume id")
            if incoming.request_id != request_id:
                raise Refused("this resume id belongs to another request")
        session = Session(request_id, incoming, self._engine_client, is_parsed=is_chat and self._parses_chats)
        session.starts_now = starts_now and incoming is None
        self._sessions[request_id] = session
        return session

    def close_session(self, session: Session) -> None:
        session.closed.set()
        if self._sessions.get(session.request_id) is session:
            del self._sessions[session.request_id]
        outgoing = self._outgoing.get(session.request_id)
        if outgoing is not None and outgoing.session is session and not session.is_leaving:
            outgoing.stop("the reply has ended")
        incoming = session.incoming
        if incoming is not None:
            incoming.detach(session)
            if session.live or incoming.committed:
                self._incoming.pop(incoming.resume_id, None)
                # It may be over before the engine has heard of the request: then vLLM has nothing to abort, and what
                # was set aside for it would stay until its lease ends.
                self._spawn(self._give_up(incoming, "its reply has ended"))

    def put_resume(self, resume_id: str, resume: wire.Resume) -> None:
        """A gateway gives the output tokens of a request that is to go on here without KV."""
        if resume_id in self._incoming:
            raise Refused("this resume id is in use")
        if len(self._incoming) >= RESUMES_MAX:
            raise Refused("too many requests are waiting to be resumed")
        incoming = Incoming(resume_id, resume.request_id, self.engine)
        incoming.tokens = resume.output_token_ids
        incoming.moves = counted_moves(resume.moves)
        incoming.committed = True
        self._incoming[resume_id] = incoming

    async def delete_resume(self, resume_id: str) -> None:
        if (incoming := self._incoming.get(resume_id)) is not None:
            await self._give_up(incoming, "the gateway gave it up")

    async def empty(self) -> None:
        """Take nothing new, and wait for a gateway to move what is here: it sees in the reports that this one drains.

        Ends when nothing is left, when nobody reads the reports, or after the time that the settings give.
        """
        self.draining = True
        logger.info("draining before the end: %d requests are here", len(self._sessions))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_s):
                while self._sessions and self._readers > 0 and not self._ended:
                    async with self._reported:
                        await self._reported.wait()
        logger.info("drained: %d requests are still here", len(self._sessions))

    # The handshake, as the destination.

    async def reserve(self, migration_id: str, body: Reserve) -> dict[str, Any]:
        if self.draining:
            raise Refused("the destination is draining")
        if migration_id in self._aborted:
            raise Refused("the migration was given up")
        if self._arriving() >= MIGRATIONS_IN_MAX or migration_id in self._incoming:
            raise Refused("the destination takes no more migrations now")
        incoming = Incoming(migration_id, body.request_id, self.engine)
        incoming.copy = self._data.kv_format is not None and self._data.kv_format == body.kv_format
        incoming.is_migration = True
        incoming.moves = counted_moves(body.moves + 1)
        incoming.rank_agents = read_agents(body.agents)
        incoming.copy = incoming.copy and len(incoming.rank_agents) == len(self._data.agents)
        incoming.read_token = body.read_token
        self._incoming[migration_id] = incoming
        try:
            answer = await self.engine(
                "reserve",
                resume_id=migration_id,
                prompt_token_ids=body.prompt_token_ids,
                output_token_ids=body.output_token_ids,
                cache_salt=body.cache_salt,
                blocks=body.blocks,
                copy=incoming.copy,
            )
        except BaseException:
            del self._incoming[migration_id]
            raise
        if not answer["accepted"]:
            del self._incoming[migration_id]
            raise Refused(answer["reason"])
        incoming.blocks = answer["reused"]
        incoming.engine_tokens = len(body.output_token_ids)
        incoming.extend(0, body.output_token_ids)
        return {"copy": incoming.copy, "reused": answer["reused"]}

    def _arriving(self) -> int:
        """Migrations whose copy is under way; one that is committed needs no more than its request does."""
        return sum(1 for entry in self._incoming.values() if entry.is_migration and not entry.committed)

    async def stage(self, migration_id: str, body: Stage) -> dict[str, Any]:
        incoming = self._known(migration_id)
        fetched = await self._fetch(incoming, body, STAGE_TIMEOUT_S)
        deadline = time.monotonic() + min(body.wait_s, PREBIND_WAIT_S)
        while not incoming.is_ready and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(incoming.bound.wait(), left_s)
            if not incoming.is_ready:
                await asyncio.sleep(REPLAY_POLL_S)
        return {"bytes": fetched, "bound": incoming.is_ready}

    async def commit(self, migration_id: str, body: Commit) -> dict[str, Any]:
        incoming = self._known(migration_id)
        if incoming.committed:
            raise Refused("the migration was committed already")
        fetched = await self._fetch(incoming, body, COMMIT_TIMEOUT_S)
        if len(incoming.tokens) != body.output_tokens:
            raise Refused(f"{len(incoming.tokens)} output tokens arrived, not {body.output_tokens}")
        incoming.logprobs = body.logprobs
        incoming.cached_tokens = body.cached_tokens
        bound = await incoming.commit()
        self._spawn(self._close_source(migration_id))
        return {"bytes": fetched, "bound": bound}

    async def abort(self, migration_id: str, reason: str) -> None:
        self._aborted.append(migration_id)  # Its reserve may still be on the way, on another connection.
        if (incoming := self._incoming.get(migration_id)) is not None:
            await self._give_up(incoming, f"the source gave the migration up: {reason}")

    async def _give_up(self, incoming: Incoming, reason: str) -> None:
        self._incoming.pop(incoming.resume_id, None)
        if incoming.is_migration:
            await self._close_source(incoming.resume_id)  # First: it ends a pull that is under way.
        await incoming.close(reason)

    def _known(self, migration_id: str) -> Incoming:
        incoming = self._incoming.get(migration_id)
        if incoming is None or incoming.closed:
            raise Refused("the destination does not know this migration, or has given it up")
        return incoming

    async def _fetch(self, incoming: Incoming, body: Stage, timeout_s: float) -> int:
        """Fetch a stage's blocks from the source's agents, rank by rank, and make them findable; bytes fetched."""
        if body.blocks_from != incoming.blocks:
            raise Refused(f"expected blocks from number {incoming.blocks} on, not {body.blocks_from}")
        incoming.renew()
        async with incoming.lock:
            if incoming.closed:
                raise Refused("the migration was given up")
            if body.tokens_from != len(incoming.tokens):
                raise Refused(f"expected output tokens from number {len(incoming.tokens)} on, not {body.tokens_from}")
            fetched = 0
            # The last tokens, where no block comes with them, reach the engine with the commit: it answers between two
            # of its steps only, and the client waits.
            if body.source_blocks or not isinstance(body, Commit):
                fetched = await self._extend(incoming, body, timeout_s)
            if not isinstance(body, Commit) or body.logprobs is None:
                incoming.extend(body.tokens_from, body.output_token_ids)
            else:
                incoming.tokens.extend(body.output_token_ids)
        return fetched

    async def _extend(self, incoming: Incoming, body: Stage, timeout_s: float) -> int:
        total = incoming.blocks + len(body.source_blocks)
        answer = await self.engine(
            "extend", resume_id=incoming.resume_id, blocks=total, output_token_ids=body.output_token_ids
        )
        if not answer["accepted"]:
            raise Refused(answer["reason"])
        incoming.engine_tokens = body.tokens_from + len(body.output_token_ids)
        fetched = 0
        if body.source_blocks:
            if not incoming.copy:
                raise Refused("this migration copies no blocks")
            fetched = await self._pull(incoming, body.source_blocks, answer["block_ids"], timeout_s)
            answer = await self.engine("received", resume_id=incoming.resume_id, blocks=total)
            if not answer["accepted"]:
                raise Refused(answer["reason"])
        incoming.blocks = total
        return fetched

    async def _pull(self, incoming: Incoming, source: list[int], blocks: list[int], timeout_s: float) -> int:
        """Have the workers fetch blocks. The engine is not to free them before this has ended, one way or the other."""
        try:
            return await self._order_pulls(incoming, source, blocks, timeout_s)
        except BaseException:
            await asyncio.shield(self._spawn(self._end_pull(incoming.resume_id)))
            raise

    async def _end_pull(self, migration_id: str) -> None:
        await self._close_source(migration_id)
        await self.engine("written", resume_id=migration_id)

    async def _order_pulls(self, incoming: Incoming, source: list[int], blocks: list[int], timeout_s: float) -> int:
        answers = await asyncio.gather(
            *(
                agent.order(
                    timeout_s,
                    op="pull",
                    migration=incoming.resume_id,
                    host=host,
                    port=port,
                    token=incoming.read_token,
                    source_blocks=source,
                    blocks=blocks,
                )
                for agent, (host, port) in zip(self._data.agents, incoming.rank_agents, strict=True)
            )
        )
        return sum(int(answer["bytes"]) for answer in answers)

    async def _close_source(self, migration_id: str) -> None:
        for agent in self._data.agents:
            try:
                await agent.order(COMMIT_TIMEOUT_S, op="close", migration=migration_id)
            except TransferError as error:
                logger.warning("connection of %s not closed (it ends by itself): %s", migration_id, error)

    # Migrations out.

    async def migrate(self, order: wire.MigrateOrder) -> wire.MigrationResult:
        """Move one request now. Raises NoSuchRequest, or Refused with why it cannot move."""
        self._fence.check(order.fence)
        session = self._sessions.get(order.request_id)
        if session is None:
            raise NoSuchRequest(order.request_id)
        if order.destination_id == self.instance_id:
            raise Refused("the destination is the source")
        if session.reason is not None:
            raise Refused(f"the request cannot move: {session.reason}")
        if order.request_id in self._outgoing:
            raise Refused("the request is moving already")
        if len(self._outgoing) >= MIGRATIONS_OUT_MAX:
            raise Refused("too many requests are moving already")
        copies = order.method != "recompute" and self._uncopied.copies(order.destination_id)
        kv_format = self._data.kv_format if copies else None
        migration = Migration(
            session,
            self.instance_id,
            Destination(order.destination_id, order.destination_url),
            self._peer,
            self.engine,
            self._data.agents if kv_format is not None else [],
            kv_format,
            self.settings.advertise_host,
            order.method,
        )
        self._outgoing[order.request_id] = migration
        task = self._spawn(self._run(migration))
        return await asyncio.shield(task)  # It goes on when whoever ordered it goes away.

    async def _run(self, migration: Migration) -> wire.MigrationResult:
        try:
            result = await migration.run()
        finally:
            del self._outgoing[migration.request_id]
        self._note_copy(migration, result)
        metrics.migrated(result)
        self._migrations_ended = self._migrations_ended.plus(result)
        return result

    def _note_copy(self, migration: Migration, result: wire.MigrationResult) -> None:
        destination_id = result.destination_id
        if result.bytes_sent and result.outcome == "committed":
            self._uncopied.copied(destination_id)
        elif migration.could_not_copy and self._uncopied.failed(destination_id):
            why = result.reason
            logger.warning("moves to %s copy no blocks for the next %.0f s: %s", destination_id, RESTS_S, why)

    def _peer(self, destination: Destination, migration_id: str) -> Peer:
        assert self._http is not None
        return Peer(self._http, self.settings.secret, destination, migration_id)

    def pair(self, pairing: wire.Pairing | None, fence: int | None = None) -> None:
        """The leader's lease: move requests to that destination until it lapses (paper, section 4.4.3)."""
        self._fence.check(pairing.fence if pairing is not None else fence)
        self._paired.set(pairing, time.monotonic())

    async def _follow_pairing(self) -> None:
        if not self._paired.places(len(self._outgoing), time.monotonic()):
            return
        candidates = self._movable(await self.engine("requests"))
        places = self._paired.places(len(self._outgoing), time.monotonic())  # The engine may have taken its time.
        for order in self._paired.choose(candidates, places, draining=self.draining):
            self._spawn(self._try_migrate(order))

    async def _try_migrate(self, order: wire.MigrateOrder) -> None:
        try:
            committed = (await self.migrate(order)).outcome == "committed"
        except (Refused, NoSuchRequest) as refusal:
            logger.info("migrate %s: %s", order.request_id, refusal)
            committed = False
        if not committed and order.request_id in self._sessions:  # Else it has ended here, and nobody has refused it.
            self._paired.rest(time.monotonic())

    def _movable(self, requests: list[dict[str, Any]]) -> list[Movable]:
        return [
            self._paired.movable(
                request["request_id"],
                request["priority"],
                request["prompt_tokens"] + request["output_tokens"],
                is_running=request["state"] == "running",
                moves=session.moves,
                settled_s=request["settled_s"],
            )
            for request in requests
            if request["reason"] is None
            and request["request_id"] not in self._outgoing
            and (session := self._sessions.get(request["request_id"])) is not None
            and session.reason is None
        ]

    # Reports.

    async def status(self) -> wire.Status:
        requests = await self.engine("requests")
        return wire.Status(self._report or await self._make_report(), [self._request(entry) for entry in requests])

    async def arrivals(self) -> list[dict[str, Any]]:
        """The last resumed requests, each with the tokens that its first step here computed."""
        answer: list[dict[str, Any]] = await self.engine("arrivals")
        return answer

    def _request(self, entry: dict[str, Any]) -> wire.RequestStatus:
        session = self._sessions.get(entry["request_id"])
        reason = entry["reason"] or (session.reason if session is not None else "its reply has ended")
        return wire.RequestStatus(
            request_id=entry["request_id"],
            state=entry["state"],
            prompt_tokens=entry["prompt_tokens"],
            output_tokens=entry["output_tokens"],
            blocks=entry["blocks"],
            movable=reason is None,
            reason=reason,
        )

    async def reports(self) -> AsyncIterator[wire.Report]:
        """Every report from now on, the newest at once; ends with the engine, or it would hold up the server's end."""
        seen = -1
        self._readers += 1
        try:
            while True:
                async with self._reported:
                    while not self._ended and ((report := self._report) is None or report.sequence == seen):
                        await self._reported.wait()
                    if self._ended or report is None:
                        return
                seen = report.sequence
                yield report
        finally:
            self._readers -= 1

    async def _tick_forever(self) -> None:
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._tick()
                except compat.EngineDeadError:
                    logger.info("the engine has ended, and so do the reports")
                    return
                except Exception:  # One bad round must not end reports, leases and pairings for good.
                    logger.exception("a round of the llumlet failed")
                await asyncio.sleep(max(0.0, started + REPORT_INTERVAL_S - time.monotonic()))
        finally:
            async with self._reported:
                self._ended = True
                self._reported.notify_all()

    async def _tick(self) -> None:
        report = await self._make_report()
        async with self._reported:
            self._report = report
            self._reported.notify_all()
        await self._follow_pairing()
        self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        for incoming in list(self._incoming.values()):
            if incoming.deadline < now and not (incoming.session is not None and incoming.session.live):
                del self._incoming[incoming.resume_id]
                self._spawn(self._give_up(incoming, "nobody came for it in time"))

    async def _make_report(self) -> wire.Report:
        counts = await self.engine("report")
        for reason, total in counts["staying"].items():
            metrics.stays(reason, total - self._staying[reason])
            self._staying[reason] = total
        running, waiting = counts["running"], counts["waiting"]
        block_size = self._description["block_size"]
        usage = virtual_usage_blocks(
            [RequestUsage(blocks=blocks, demand_blocks=0, is_queued=False, is_head_of_line=False) for blocks in running]
            + [
                RequestUsage(blocks=0, demand_blocks=demand, is_queued=True, is_head_of_line=index == 0)
                for index, demand in enumerate(waiting)
            ],
            draining=self.draining,
        )
        usage += counts["blocks_reserved"]
        freeness = freeness_steps(counts["blocks_total"], usage, len(running), block_size)
        self._sequence += 1
        return wire.Report(
            instance_id=self.instance_id,
            boot_id=self.boot_id,
            sequence=self._sequence,
            models=self._models,
            vllm_version=compat.vllm_version(),
            plugin_version=__version__,
            protocol_version=wire.PROTOCOL_VERSION,
            kv_format=self._data.kv_format,
            kv_reason=self._data.kv_reason,
            block_size=block_size,
            blocks_total=counts["blocks_total"],
            blocks_free=counts["blocks_free"],
            blocks_reserved=counts["blocks_reserved"],
            requests_running=len(running),
            requests_waiting=len(waiting),
            requests_running_max=self._description["requests_running_max"],
            running_by_priority=counts["running_by_class"],
            waiting_by_priority=counts["waiting_by_class"],
            virtual_usage_blocks=None if self.draining else usage,
            freeness_steps=None if self.draining else freeness,
            head_of_line_blocks=waiting[0] if waiting else 0,
            queued_blocks=sum(waiting),
            step_ms=counts["step_ms"],
            draining=self.draining,
            migrations_in=self._arriving(),
            migrations_out=len(self._outgoing),
            migrations_ended=self._migrations_ended,
            fence=self._fence.newest,
            room_blocks=0 if self.draining else counts["room_blocks"],
            room_places=0 if self.draining else counts["room_places"],
        )

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the llumlet ended: %r", error, exc_info=error)


async def start_data_plane(settings: Settings, engine_client: Any, description: dict[str, Any]) -> Data:
    """Start each worker's KV agent. Without one, or with a cache that cannot be copied, moves recompute."""
    control_token = secrets.token_hex(16)
    bind = "127.0.0.1" if settings.advertise_host in ("127.0.0.1", "localhost") else "0.0.0.0"  # noqa: S104
    ranks = await compat.call_workers(engine_client, "kvferry_start_agent", control_token, bind)
    reason = description["copy_obstacle"] or next((rank["reason"] for rank in ranks if rank["reason"]), None)
    if reason is not None:
        logger.warning("moves recompute instead of copying KV blocks: %s", reason)
        return Data([], None, reason)
    agents = [AgentClient("127.0.0.1", rank["port"], control_token) for rank in ranks]
    return Data(agents, compat.kv_format(engine_client, [rank["layout"] for rank in ranks]), None)
