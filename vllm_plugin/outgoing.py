"""Source side, in the API server: one live migration from the first stage to the commit (paper, section 4.2).

The story is ``Migration.run``. Until the destination has acknowledged the commit and the engine has detached the
request, it belongs to this instance: whatever fails before lets it go on here. What the client is shown changes hands
only with the ``moved`` comment, so that no failure in between can show anything twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

from gateway import wire
from vllm_plugin import compat
from vllm_plugin.handshake import Destination, Fetched, NotCopied, Peer, Refused, Reserved
from vllm_plugin.incoming import Engine
from vllm_plugin.session import Session
from vllm_plugin.settings import (
    BIND_WAIT_S,
    BLOCK_MARGIN_TOKENS,
    COMMIT_TIMEOUT_S,
    FREEZE_LIMIT_S,
    PREBIND_WAIT_S,
    REPLAY_TOKEN_S,
    STAGE_TIMEOUT_S,
    STAGES_MAX,
)
from vllm_plugin.transfer import AgentClient, TransferError

logger = logging.getLogger("vllm.kvferry.migration")


@dataclass
class Sent:
    """What the destination has so far."""

    blocks: int = 0
    tokens: int = 0
    reused: int = 0
    bytes: int = 0
    stages: int = 0
    bound: bool = False


class Migration:
    """One request on its way out.

    ``method`` is one of ``wire.MIGRATION_METHODS``. What a live migration is compared with differs from it in the copy
    alone: ``blocking`` copies all blocks after the freeze; ``recompute`` gets no agents and no KV format, so none.
    """

    def __init__(
        self,
        session: Session,
        source_id: str,
        destination: Destination,
        peer_of: Any,
        engine: Engine,
        agents: list[AgentClient],
        kv_format: str | None,
        advertise_host: str,
        method: str = "live",
    ) -> None:
        self.migration_id = secrets.token_hex(8)
        self.session = session
        self.destination = destination
        self._source_id = source_id
        self._peer: Peer = peer_of(destination, self.migration_id)
        self._engine = engine
        self._agents = agents
        self._kv_format = kv_format
        self._advertise_host = advertise_host
        self._method = method
        self._read_token = secrets.token_hex(16)
        self._sent = Sent()
        self._copy = False
        self._preemptions = 0
        self._final_ms = 0.0
        self.could_not_copy = False
        """Of its own blocks, or its peer of them: it has failed by that."""
        self._started = time.monotonic()
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def request_id(self) -> str:
        return self.session.request_id

    def stop(self, reason: str) -> None:
        """The reply has ended (the client left, or the request finished): give up at once."""
        if not self._stopped.done():
            self._stopped.set_result(reason)

    async def run(self) -> wire.MigrationResult:
        """Move the request. Never raises for what a peer does: the result says how it ended."""
        steps = asyncio.create_task(self._steps())
        reason: str | None = None
        try:
            either: list[asyncio.Future[Any]] = [steps, self._stopped]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                await steps
            else:
                reason = self._stopped.result()
        except (Refused, TransferError, wire.WireError) as refusal:
            reason = str(refusal)
            self.could_not_copy = isinstance(refusal, NotCopied | TransferError)
        except Exception as error:  # Whatever it was: the request goes on here, and nothing is left at the peer.
            logger.exception("migration %s of %s failed", self.migration_id, self.request_id)
            reason = f"internal error: {type(error).__name__}"
        finally:
            if not steps.done():
                steps.cancel()
                await asyncio.wait([steps])
        if reason is not None:
            await self._give_up(reason)
        await self._engine("unpin", request_id=self.request_id)
        await self._close_agents()
        return self._log(self._result(reason))

    async def _steps(self) -> None:
        await self._reserve()
        await self._copy_stages()
        await self._final_stage()

    async def _reserve(self) -> None:
        begun = await self._engine("export", request_id=self.request_id)
        self._check(begun)
        self._preemptions = begun["preemptions"]
        blocks = len(begun["block_ids"])
        self._sent.tokens = len(begun["output_token_ids"])
        answer = await self._peer.post(
            "reserve",
            {
                "request_id": self.request_id,
                "source_id": self._source_id,
                "kv_format": self._kv_format,
                "agents": [[self._advertise_host, agent.port] for agent in self._agents],
                "read_token": self._read_token,
                "prompt_token_ids": begun["prompt_token_ids"],
                "output_token_ids": begun["output_token_ids"],
                "cache_salt": begun["cache_salt"],
                "blocks": blocks,
                "moves": self.session.moves,
            },
            STAGE_TIMEOUT_S,
        )
        reserved = Reserved.from_json(answer)
        self._copy = reserved.copy
        self._sent.blocks = self._sent.reused = reserved.reused
        if self.session.send_comment is not None:
            self.session.send_comment(wire.Prebind(self.migration_id, self.destination.instance_id))

    async def _copy_stages(self) -> None:
        """Send what is finished, then what was finished meanwhile, until next to nothing is left (paper, Fig. 7)."""
        prebind_deadline = time.monotonic() + PREBIND_WAIT_S + REPLAY_TOKEN_S * self._sent.tokens
        for _ in range(STAGES_MAX):
            progress = await self._engine(
                "export", request_id=self.request_id, blocks_from=self._sent.blocks, tokens_from=self._sent.tokens
            )
            self._check(progress)
            if self._method == "blocking":
                progress["block_ids"] = []  # Only the binding is waited for: the copy is to happen in the pause.
            patience_s = prebind_deadline - time.monotonic() if self.session.send_comment is not None else 0.0
            sent_blocks = await self._send("stage", progress, STAGE_TIMEOUT_S, min(patience_s, BIND_WAIT_S))
            # In the middle of a prompt there is no stream that could pause, and every step finishes blocks.
            is_amid_prompt = self._sent.tokens == 0 and progress["state"] == "running"
            if (sent_blocks <= 1 or is_amid_prompt) and (self._sent.bound or patience_s <= 0):
                await self._reach_block_end(progress)
                return

    async def _reach_block_end(self, progress: dict[str, Any]) -> None:
        """Decode on until a block is finished, and send it.

        What the destination computes itself is then a token or two instead of most of a block, and no block is left
        for the pause.
        """
        is_near_end = progress["tokens_left"] < progress["steps_to_next_block"] + BLOCK_MARGIN_TOKENS
        is_decoding = self._sent.tokens > 0 and progress["state"] == "running"
        if not self._copy or not is_decoding or is_near_end or self.session.send_comment is None:
            return
        progress = await self._engine(
            "next_block", request_id=self.request_id, blocks_from=self._sent.blocks, tokens_from=self._sent.tokens
        )
        self._check(progress)
        if self._method != "blocking":
            await self._send("stage", progress, STAGE_TIMEOUT_S)

    async def _final_stage(self) -> None:
        asked = time.monotonic()
        frozen = await self._engine(
            "freeze",
            request_id=self.request_id,
            preemptions=self._preemptions,
            blocks_from=self._sent.blocks,
            tokens_from=self._sent.tokens,
            limit_s=FREEZE_LIMIT_S if self._method != "blocking" else STAGE_TIMEOUT_S + FREEZE_LIMIT_S,
        )
        started = time.monotonic()
        self._check(frozen, frozen=True)
        if self._method == "blocking":  # A stage has the time that a copy of everything may take; a commit has not.
            await self._send("stage", frozen, STAGE_TIMEOUT_S)
            frozen = {**frozen, "block_ids": [], "output_token_ids": []}
        await self._send("commit", frozen, COMMIT_TIMEOUT_S)
        acknowledged = time.monotonic()
        self._final_ms = (acknowledged - started) * 1000
        moved = wire.Moved(self.migration_id, self.destination.instance_id, self._sent.tokens)
        if acknowledged - asked < FREEZE_LIMIT_S:
            # It stands still here, whatever the engine answers: the client need not wait for that.
            self.session.leave(moved)
            await self._engine("detach", request_id=self.request_id)
            return
        answer = await self._engine("detach", request_id=self.request_id)
        if not answer["detached"]:
            raise Refused("the request went on here, or ended, before the commit was acknowledged")
        self.session.leave(moved)

    async def _send(self, step: str, progress: dict[str, Any], timeout_s: float, wait_s: float = 0.0) -> int:
        """Tell the destination to fetch the new blocks; the number of blocks.

        With little to fetch, the answer may wait ``wait_s`` for the gateway, while decoding goes on here.
        """
        blocks = progress["block_ids"] if self._copy else []
        body: dict[str, Any] = {
            "blocks_from": self._sent.blocks,
            "source_blocks": blocks,
            "tokens_from": self._sent.tokens,
            "output_token_ids": progress["output_token_ids"],
            "wait_s": wait_s if len(blocks) <= 1 or self._sent.tokens == 0 else 0.0,
        }
        if step == "commit":
            total = self._sent.tokens + len(progress["output_token_ids"])
            body |= {
                "output_tokens": total,
                "logprobs": await self._logprobs(total),
                "cached_tokens": await self._cached_tokens(total, progress["cached_tokens"]),
            }
        if blocks:
            await asyncio.gather(
                *(
                    agent.order(timeout_s, op="grant", token=self._read_token, blocks=blocks, ttl_s=timeout_s)
                    for agent in self._agents
                )
            )
        fetched = Fetched.from_json(await self._peer.post(step, body, timeout_s))
        self._sent.blocks += len(blocks)
        self._sent.tokens += len(progress["output_token_ids"])
        self._sent.bytes += fetched.bytes
        self._sent.bound = fetched.bound
        self._sent.stages += 1
        return len(blocks)

    async def _logprobs(self, count: int) -> list[Any] | None:
        """The tokens' log probabilities, which a JSON reply at the destination needs; a stream has had them."""
        if not self.session.final_only:
            return None
        await self._front_end_has(count)
        return compat.export_logprobs(self.session.state, count)

    async def _cached_tokens(self, count: int, in_engine: int | None) -> int | None:
        """The client's prefix hit: the engine knows it until the first token, the front end from then on."""
        if count == 0:
            return in_engine
        await self._front_end_has(1)
        return compat.cached_tokens(self.session.state)

    async def _front_end_has(self, output_tokens: int) -> None:
        deadline = time.monotonic() + 1.0
        while compat.front_end_tokens(self.session.state) < output_tokens:
            if time.monotonic() > deadline:
                raise Refused("the front end has not caught up with the engine")
            await asyncio.sleep(0)

    def _check(self, progress: dict[str, Any], *, frozen: bool = False) -> None:
        """The paper's check after each stage: has the request finished, or lost its blocks?"""
        if progress["state"] not in (("migrating",) if frozen else ("running", "waiting")):
            raise Refused(progress["reason"] or f"the request is {progress['state']}")
        if self._sent.stages and progress["preemptions"] != self._preemptions:
            raise Refused("the request was preempted")

    async def _give_up(self, reason: str) -> None:
        await self._engine("unfreeze", request_id=self.request_id)
        try:
            await self._peer.post("abort", {"reason": reason}, COMMIT_TIMEOUT_S)
        except Refused as refusal:
            logger.info("abort of %s not acknowledged (its lease ends by itself): %s", self.migration_id, refusal)
        if self.session.send_comment is not None:
            self.session.send_comment(wire.Unbind(self.migration_id))

    async def _close_agents(self) -> None:
        for agent in self._agents:
            try:
                await agent.order(COMMIT_TIMEOUT_S, op="revoke", token=self._read_token)
            except TransferError as error:
                logger.warning("grant of %s not revoked (it ends by itself): %s", self.migration_id, error)

    def _log(self, result: wire.MigrationResult) -> wire.MigrationResult:
        logger.info(
            "migrate %s %s->%s %s at output token %d: %d stages, %d blocks sent, %d reused, %.1f ms, final %.1f ms%s",
            self.request_id, self._source_id, self.destination.instance_id, result.outcome, result.output_tokens,
            result.stages, result.blocks_sent, result.blocks_reused, result.duration_ms, result.final_ms,
            f": {result.reason}" if result.reason else "",
        )  # fmt: skip
        return result

    def _result(self, reason: str | None) -> wire.MigrationResult:
        sent = self._sent
        return wire.MigrationResult(
            migration_id=self.migration_id,
            request_id=self.request_id,
            source_id=self._source_id,
            destination_id=self.destination.instance_id,
            outcome="aborted" if reason else "committed",
            reason=reason,
            stages=sent.stages,
            blocks_sent=sent.blocks - sent.reused,
            blocks_reused=sent.reused,
            bytes_sent=sent.bytes,
            output_tokens=sent.tokens,
            duration_ms=round((time.monotonic() - self._started) * 1000, 3),
            final_ms=round(self._final_ms, 3),
        )
