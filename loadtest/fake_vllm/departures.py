"""A fake's llumlet as the source: one migration, step by step as ``vllm_plugin.outgoing`` does it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from gateway import wire
from loadtest.fake_vllm.instance import Instance, Reply
from loadtest.sim.engine import Exported
from vllm_plugin.handshake import Destination, Fetched, Peer, Refused, Reserved
from vllm_plugin.settings import BIND_WAIT_S, COMMIT_TIMEOUT_S, PREBIND_WAIT_S, STAGE_TIMEOUT_S, STAGES_MAX

PeerOf = Callable[[Destination, str], Peer]


class Departure:
    """What fails before the commit is acknowledged leaves the request running here."""

    def __init__(
        self,
        instance: Instance,
        reply: Reply,
        source_id: str,
        destination: Destination,
        peer_of: PeerOf,
        kv_format: str | None,
        agent: tuple[str, int],
        method: str,
        moves: int,
    ) -> None:
        """``moves``: of the request before."""
        self.migration_id = secrets.token_hex(8)
        self.reply = reply
        self.destination = destination
        self.read_token = secrets.token_hex(16)
        self._instance = instance
        self._engine = instance.engine
        self._source_id = source_id
        self._peer = peer_of(destination, self.migration_id)
        self._kv_format = kv_format if method != "recompute" else None
        self._agent = agent
        self._method = method
        self._moves = moves
        self._shows_comments = reply.is_stream
        self._copy = False
        self._blocks = self._tokens = self._reused = self._bytes = self._stages = 0
        self._bound = False
        self._preemptions = 0
        self._started = time.monotonic()
        self._final_ms = 0.0

    async def run(self) -> wire.MigrationResult:
        """Never raises for what a peer does: the result says how it ended."""
        reason = None
        steps = asyncio.create_task(self._steps())
        gone = asyncio.create_task(self._reply_ends(steps))
        try:
            await asyncio.wait({steps, gone}, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                await steps
            else:
                reason = "the reply has ended"
        except (Refused, wire.WireError) as refusal:
            reason = str(refusal)
        finally:
            for task in (steps, gone):
                task.cancel()
            await asyncio.wait({steps, gone})
        if reason is not None:
            await self._give_up(reason)
        return self._result(reason)

    async def _reply_ends(self, steps: asyncio.Task[None]) -> None:
        """The request has finished, or its client has left."""
        async with self._instance.boundaries:
            while not steps.done() and self._engine.get(self._id) is self.reply.request:
                await self._instance.boundaries.wait()

    @property
    def _id(self) -> str:
        return self.reply.request.request_id

    async def _steps(self) -> None:
        exported = self._export()
        await self._reserve(exported)
        await self._copy_stages()
        await self._final_stage()

    async def _reserve(self, exported: Exported) -> None:
        request = self.reply.request
        self._preemptions = exported.preemptions
        self._tokens = exported.output_tokens
        answer = await self._peer.post(
            "reserve",
            {
                "request_id": self.reply.request_id,
                "source_id": self._source_id,
                "kv_format": self._kv_format,
                "agents": [list(self._agent)] if self._kv_format is not None else [],
                "read_token": self.read_token,
                "prompt_token_ids": list(request.prompt),
                "output_token_ids": request.output_token_ids(0, self._tokens),
                "cache_salt": None,
                "blocks": len(exported.blocks),
                "moves": self._moves,
            },
            STAGE_TIMEOUT_S,
        )
        reserved = Reserved.from_json(answer)
        self._copy = reserved.copy
        self._blocks = self._reused = reserved.reused
        if self._shows_comments:
            self.reply.comment(wire.Prebind(self.migration_id, self.destination.instance_id))

    async def _copy_stages(self) -> None:
        """Until next to nothing is left, and the gateway has opened the request at the destination."""
        deadline = time.monotonic() + PREBIND_WAIT_S
        for _ in range(STAGES_MAX):
            patience_s = deadline - time.monotonic() if self._shows_comments else 0.0
            sent = await self._send("stage", self._export(), min(patience_s, BIND_WAIT_S))
            if sent <= 1 and (self._bound or patience_s <= 0):
                return

    async def _final_stage(self) -> None:
        if not self._engine.freeze(self._id):
            raise Refused("the request is neither running nor queued")
        if not await self._instance.settled(self.reply.request):
            raise Refused("the request has finished")
        started = time.monotonic()
        await self._send("commit", self._export(frozen=True))
        self._final_ms = (time.monotonic() - started) * 1000
        if not self._engine.detach(self._id):
            raise Refused("the request ended before the commit was acknowledged")
        self.reply.leave(wire.Moved(self.migration_id, self.destination.instance_id, self._tokens))
        self._instance.wake()

    def _export(self, *, frozen: bool = False) -> Exported:
        """The paper's check after each stage: has the request finished, or lost its blocks?"""
        exported = self._engine.export(self._id)
        if exported is None:
            raise Refused("the request has finished")
        if self._stages and exported.preemptions != self._preemptions:
            raise Refused("the request was preempted")
        assert not frozen or self._engine.is_settled(self._id)
        return exported

    async def _send(self, step: str, exported: Exported, wait_s: float = 0.0) -> int:
        """Have the destination fetch the new blocks; their number."""
        await self._instance.unless_hanging()
        is_commit = step == "commit"
        copies = self._copy and (is_commit or self._method != "blocking")
        blocks = exported.blocks[self._blocks :] if copies else []
        token_ids = self.reply.request.output_token_ids(self._tokens, exported.output_tokens)
        body: dict[str, Any] = {
            "blocks_from": self._blocks,
            "source_blocks": blocks,
            "tokens_from": self._tokens,
            "output_token_ids": token_ids,
            "wait_s": max(wait_s, 0.0) if len(blocks) <= 1 else 0.0,
        }
        if is_commit:
            cached = self.reply.request.cached_tokens
            body |= {"output_tokens": exported.output_tokens, "logprobs": None, "cached_tokens": cached}
        self._engine.transfers += bool(blocks)
        try:
            timeout_s = COMMIT_TIMEOUT_S if is_commit else STAGE_TIMEOUT_S
            fetched = Fetched.from_json(await self._peer.post(step, body, timeout_s))
        finally:
            self._engine.transfers -= bool(blocks)
        self._blocks += len(blocks)
        self._tokens = exported.output_tokens
        self._bytes += fetched.bytes
        self._bound = fetched.bound
        self._stages += 1
        return len(blocks)

    async def _give_up(self, reason: str) -> None:
        self._engine.unfreeze(self._id)
        self._instance.wake()
        with contextlib.suppress(Refused):  # Its lease ends by itself.
            await self._peer.post("abort", {"reason": reason}, COMMIT_TIMEOUT_S)
        if self._shows_comments:
            self.reply.comment(wire.Unbind(self.migration_id))

    def _result(self, reason: str | None) -> wire.MigrationResult:
        return wire.MigrationResult(
            migration_id=self.migration_id,
            request_id=self.reply.request_id,
            source_id=self._source_id,
            destination_id=self.destination.instance_id,
            outcome="aborted" if reason else "committed",
            reason=reason,
            stages=self._stages,
            blocks_sent=self._blocks - self._reused,
            blocks_reused=self._reused,
            bytes_sent=self._bytes,
            output_tokens=self._tokens,
            duration_ms=round((time.monotonic() - self._started) * 1000, 3),
            final_ms=round(self._final_ms, 3),
        )
