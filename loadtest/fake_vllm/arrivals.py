"""A fake's llumlet as the destination: what is arriving, from the reservation to the first step here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import aiohttp

from gateway import wire
from loadtest.fake_vllm.instance import Instance, Reply
from loadtest.sim.engine import EngineError, Request
from vllm_plugin.handshake import Commit, Refused, Reserve, Stage, read_agents
from vllm_plugin.pairing import counted_moves
from vllm_plugin.settings import (
    CLAIM_LIMIT_S,
    COMMIT_TIMEOUT_S,
    MIGRATIONS_IN_MAX,
    PREBIND_WAIT_S,
    RESERVATION_LEASE_S,
    RESUMES_MAX,
    STAGE_TIMEOUT_S,
)

ABORTED_KEPT = 256

FetchContents = Callable[[tuple[str, int], str, list[int], float], Awaitable[list[int | None]]]
"""Agent, token and blocks in, what those blocks hold out."""


class Arrival:
    """One request that is arriving: by a peer's ``reserve``, or by a gateway that gives the tokens alone."""

    def __init__(self, resume_id: str, request_id: str, prompt: list[int], output: list[int]) -> None:
        self.resume_id = resume_id
        self.request_id = request_id
        self.output = output
        self.sequence = Request(resume_id, [*prompt, *output], 1)
        """Stands for the tokens so far, whose digests the arriving blocks must have."""
        self.copy = False
        self.agent: tuple[str, int] | None = None
        self.read_token = ""
        self.blocks = 0
        self.is_migration = False
        self.moves = 0
        """Of the request so far, with the one that brings it here."""
        self.started_at: float | None = None
        """When it went on here."""
        self.committed = False
        self.reply: Reply | None = None
        self.bound = asyncio.Event()
        self.settled = asyncio.Event()
        """It goes on here, or ``failed`` says why not."""
        self.failed: str | None = None
        self.deadline = 0.0
        self.renew(RESERVATION_LEASE_S)

    def __repr__(self) -> str:
        return f"<Arrival {self.resume_id} tokens={len(self.output)} committed={self.committed}>"

    @property
    def is_live(self) -> bool:
        return self.settled.is_set() and self.failed is None

    def renew(self, lease_s: float) -> None:
        self.deadline = time.monotonic() + lease_s

    def extend(self, offset: int, token_ids: list[int]) -> None:
        if offset != len(self.output):
            raise Refused(f"expected output tokens from number {len(self.output)} on, not {offset}")
        self.output.extend(token_ids)
        self.sequence = grown(self.sequence, token_ids)

    def fail(self, reason: str) -> None:
        if not self.settled.is_set():
            self.failed = reason
            self.settled.set()


def grown(sequence: Request, token_ids: list[int]) -> Request:
    return Request(sequence.request_id, [*sequence.prompt, *token_ids], 1)


class Arrivals:
    def __init__(self, instance: Instance, kv_format: str | None, fetch_contents: FetchContents) -> None:
        self._instance = instance
        self._engine = instance.engine
        self._kv_format = kv_format
        self._fetch_contents = fetch_contents
        self._arrivals: dict[str, Arrival] = {}
        self._aborted: deque[str] = deque(maxlen=ABORTED_KEPT)

    def copying(self) -> int:
        """Migrations on their way here that are not committed."""
        return sum(arrival.is_migration and not arrival.committed for arrival in self._arrivals.values())

    def parked(self) -> list[Arrival]:
        """Those that a gateway has opened here and that do not run yet."""
        return [arrival for arrival in self._arrivals.values() if arrival.reply is not None and not arrival.is_live]

    # The handshake.

    def reserve(self, migration_id: str, body: Reserve, draining: bool) -> dict[str, object]:
        if draining:
            raise Refused("the destination is draining")
        if self._instance.faults.busy:
            raise Refused("the destination is busy")
        if migration_id in self._aborted:
            raise Refused("the migration was given up")
        if self.copying() >= MIGRATIONS_IN_MAX or migration_id in self._arrivals:
            raise Refused("the destination takes no more migrations now")
        arrival = Arrival(migration_id, body.request_id, body.prompt_token_ids, body.output_token_ids)
        agents = read_agents(body.agents)
        arrival.is_migration = True
        arrival.moves = counted_moves(body.moves + 1)
        arrival.copy = self._kv_format is not None and self._kv_format == body.kv_format and len(agents) == 1
        arrival.agent = agents[0] if arrival.copy else None
        arrival.read_token = body.read_token
        blocks = body.blocks if arrival.copy else 0  # The source counts in blocks of its own size.
        if not 0 <= blocks * self._engine.settings.block_size <= arrival.sequence.prompt_tokens:
            raise Refused("more blocks than the tokens so far fill")
        reservation = self._engine.reserve(migration_id, arrival.sequence, blocks, copied=arrival.copy)
        if reservation is None:
            raise Refused("the destination has too few free blocks, or its batch is full")
        arrival.blocks = reservation.reused
        self._arrivals[migration_id] = arrival
        return {"copy": arrival.copy, "reused": reservation.reused}

    async def stage(self, migration_id: str, body: Stage) -> dict[str, object]:
        arrival = self._known(migration_id)
        fetched = await self._fetch(arrival, body, STAGE_TIMEOUT_S)
        if not arrival.bound.is_set() and body.wait_s > 0:
            await _wait(arrival.bound, min(body.wait_s, PREBIND_WAIT_S))
        return {"bytes": fetched, "bound": arrival.bound.is_set()}

    async def commit(self, migration_id: str, body: Commit) -> dict[str, object]:
        arrival = self._known(migration_id)
        if arrival.committed:
            raise Refused("the migration was committed already")
        fetched = await self._fetch(arrival, body, COMMIT_TIMEOUT_S)
        if len(arrival.output) != body.output_tokens:
            raise Refused(f"{len(arrival.output)} output tokens arrived, not {body.output_tokens}")
        arrival.committed = True
        if arrival.reply is None:  # A gateway comes at once, unless its client has left.
            arrival.renew(CLAIM_LIMIT_S)
            return {"bytes": fetched, "bound": False}
        self._start(arrival)
        if arrival.failed is not None:
            raise Refused(arrival.failed)
        return {"bytes": fetched, "bound": True}

    def abort(self, migration_id: str, reason: str) -> None:
        self._aborted.append(migration_id)  # Its reserve may still be on the way.
        if (arrival := self._arrivals.get(migration_id)) is not None:
            self._give_up(arrival, f"the source gave the migration up: {reason}")

    async def _fetch(self, arrival: Arrival, body: Stage, timeout_s: float) -> int:
        """Bytes of the blocks that came, whose contents were those of the tokens that came."""
        if body.blocks_from != arrival.blocks:
            raise Refused(f"expected blocks from number {arrival.blocks} on, not {body.blocks_from}")
        arrival.renew(RESERVATION_LEASE_S + timeout_s)
        arrival.extend(body.tokens_from, body.output_token_ids)
        total = arrival.blocks + len(body.source_blocks)
        if not arrival.copy and body.source_blocks:
            raise Refused("this migration copies no blocks")
        if total * self._engine.settings.block_size > arrival.sequence.prompt_tokens:
            raise Refused("more blocks than the tokens so far fill")
        if arrival.copy and not self._engine.extend(arrival.resume_id, total):
            raise Refused("the destination has too few free blocks")
        if arrival.agent is None or not body.source_blocks:
            return 0
        self._engine.transfers += 1
        try:
            contents = await self._fetch_contents(arrival.agent, arrival.read_token, body.source_blocks, timeout_s)
        finally:
            self._engine.transfers -= 1
        if arrival.failed is not None or arrival.resume_id not in self._arrivals:
            raise Refused("the migration was given up")
        if contents != arrival.sequence.contents(total, self._engine.settings.block_size)[arrival.blocks :]:
            raise Refused("blocks arrived damaged: a checksum is wrong")
        self._engine.receive(arrival.resume_id, arrival.sequence, total)
        arrival.blocks = total
        return len(contents) * self._engine.settings.block_size * self._engine.profile.kv_bytes_per_token

    # What gateways ask for.

    def put_resume(self, resume_id: str, resume: wire.Resume) -> None:
        if resume_id in self._arrivals:
            raise Refused("this resume id is in use")
        if len(self._arrivals) >= RESUMES_MAX:
            raise Refused("too many requests are waiting to be resumed")
        arrival = Arrival(resume_id, resume.request_id, [], resume.output_token_ids)
        arrival.committed = True
        arrival.moves = counted_moves(resume.moves)
        self._arrivals[resume_id] = arrival

    def delete_resume(self, resume_id: str) -> None:
        if (arrival := self._arrivals.get(resume_id)) is not None:
            self._give_up(arrival, "the gateway gave it up")

    def claim(self, resume_id: str, reply: Reply) -> Arrival:
        """A gateway has opened the request here. Raises Refused."""
        arrival = self._arrivals.get(resume_id)
        if arrival is None or arrival.settled.is_set() or arrival.reply is not None:
            raise Refused("nothing is known under this resume id")
        if arrival.request_id != reply.request_id:
            raise Refused("this resume id belongs to another request")
        arrival.reply = reply
        arrival.bound.set()
        if arrival.committed:
            self._start(arrival)
        return arrival

    def unclaim(self, arrival: Arrival) -> None:
        """The gateway has closed that reply. Before the commit it may come again; the source will hear of it."""
        if arrival.resume_id in self._arrivals and not arrival.committed:
            arrival.reply = None
            arrival.bound.clear()
        else:
            self._give_up(arrival, "its reply has ended")

    def _start(self, arrival: Arrival) -> None:
        """Committed and claimed: go on from the tokens so far."""
        assert arrival.reply is not None
        request, output_tokens = arrival.reply.request, len(arrival.output)
        if request.output_token_ids(0, output_tokens) != arrival.output:
            self._give_up(arrival, "the output tokens so far are not those of this request")
            return
        request.output_tokens = output_tokens
        arrival.started_at = time.monotonic()
        del self._arrivals[arrival.resume_id]
        try:
            if output_tokens >= request.output_tokens_max:
                arrival.reply.finish()
            else:
                if not self._engine.adopt(arrival.resume_id, request):
                    self._engine.add(request)
                self._instance.follow(arrival.reply)
        except EngineError as error:
            arrival.fail(str(error))
        finally:
            self._engine.release(arrival.resume_id)
            arrival.settled.set()

    def expire(self) -> None:
        now = time.monotonic()
        for arrival in [arrival for arrival in self._arrivals.values() if arrival.deadline < now]:
            self._give_up(arrival, "nobody came for it in time")

    def _give_up(self, arrival: Arrival, reason: str) -> None:
        if self._arrivals.pop(arrival.resume_id, None) is not None:
            self._engine.release(arrival.resume_id)
            self._instance.wake()
        arrival.fail(reason)

    def _known(self, migration_id: str) -> Arrival:
        arrival = self._arrivals.get(migration_id)
        if arrival is None:
            raise Refused("the destination does not know this migration, or has given it up")
        return arrival


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()


def contents_fetcher(http: aiohttp.ClientSession, secret: str, kv_s_per_block: float) -> FetchContents:
    """Asks the source, and takes as long as the copy would."""

    async def fetch(agent: tuple[str, int], token: str, blocks: list[int], timeout_s: float) -> list[int | None]:
        host, port = agent
        headers = {wire.SECRET_HEADER: secret}
        body = {"token": token, "blocks": blocks}
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(kv_s_per_block * len(blocks))
                async with http.post(f"http://{host}:{port}/fake/blocks", json=body, headers=headers) as response:
                    if response.status != 200:
                        raise Refused(f"the source refused to give its blocks: status {response.status}")
                    contents: list[int | None] = (await response.json())["contents"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise Refused(f"the source did not give its blocks: {error!r}") from error
        return contents

    return fetch
