"""Destination side, in the API server: what is known of a request before and while it is resumed here.

An Incoming is made by a peer's ``reserve`` (a migration) or by a gateway's ``PUT /llumlet/resumes`` (tokens only). A
session attaches when the gateway opens the request under its id, before or after the commit. Output tokens are
replayed through the front end as they become known, so that at the commit only the last few are left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from vllm_plugin import compat
from vllm_plugin.handshake import Refused
from vllm_plugin.session import Session
from vllm_plugin.settings import CLAIM_LIMIT_S, COMMIT_TIMEOUT_S, REPLAY_TOKEN_S, RESERVATION_LEASE_S

logger = logging.getLogger("vllm.kvferry.incoming")

REPLAY_LAG_TOKENS = 8
"""A request whose replay is so close to its output's end is ready for the commit."""
COMPILING_POLL_S = 0.005


class Engine(Protocol):
    """The engine agent, as the API server reaches it."""

    async def __call__(self, operation: str, **payload: Any) -> Any: ...


class Incoming:
    """One request that is arriving. ``committed`` once its output tokens are complete."""

    def __init__(self, resume_id: str, request_id: str, engine: Engine) -> None:
        self.resume_id = resume_id
        self.request_id = request_id
        self.is_migration = False
        """Whether it comes from a peer; else a gateway has given its tokens."""
        self.copy = False
        """Whether KV blocks come along, or everything is computed again."""
        self.rank_agents: list[tuple[str, int]] = []
        """Host and port of the source's KV agents, by rank."""
        self.read_token = ""
        self.moves = 0
        """Of that request so far, with the one that brings it here."""
        self.blocks = 0
        """Leading blocks that are here."""
        self.tokens: list[int] = []
        self.engine_tokens = 0
        """Of these, how many the engine has been told with the stages."""
        self.replayed = 0
        self.logprobs: list[Any] | None = None
        self.cached_tokens: int | None = None
        self.committed = False
        self.closed = False
        self.lock = asyncio.Lock()
        """Held while blocks are being written: they must not be freed meanwhile."""
        self.session: Session | None = None
        self.bound = asyncio.Event()
        """The gateway has opened the request here."""
        self.deadline = 0.0
        self._engine = engine
        self._finishing: asyncio.Task[None] | None = None
        self._stop_string: str | None = None
        self.renew()

    def __repr__(self) -> str:
        return f"<Incoming {self.resume_id} tokens={len(self.tokens)} committed={self.committed}>"

    @property
    def is_ready(self) -> bool:
        """Whether the gateway has opened the request here, and what is known of its output is nearly replayed."""
        session = self.session
        return session is not None and session.replay_lag(len(self.tokens)) <= REPLAY_LAG_TOKENS

    @property
    def is_replayed(self) -> bool:
        """Whether the tokens are complete and have all been through the front end."""
        return self.committed and self.replayed == len(self.tokens)

    def renew(self) -> None:
        self.deadline = time.monotonic() + RESERVATION_LEASE_S

    def attach(self, session: Session) -> None:
        """The gateway has opened the request here, and vLLM's front end knows it."""
        if self.closed:
            session.fail("the migration was given up")
            return
        self.session = session
        self.bound.set()
        self.replay()
        if self.committed:
            self._finishing = asyncio.create_task(self._finish_late(session))

    def detach(self, session: Session) -> None:
        """The gateway has closed its reply. (The engine drops the parked request when vLLM aborts it.)"""
        if self.session is session:
            self.session = None
            self.bound.clear()
            self.replayed = 0

    def extend(self, offset: int, token_ids: list[int]) -> None:
        """Output tokens from number ``offset`` on."""
        if offset != len(self.tokens):
            raise Refused(f"expected output tokens from number {len(self.tokens)} on, not {offset}")
        self.tokens.extend(token_ids)
        self.replay()

    def replay(self) -> None:
        """Take what is new through the front end of the attached session."""
        session = self.session
        if session is None or session.state is None or self.replayed == len(self.tokens):
            return
        if session.final_only and not self.committed:
            return  # Its log probabilities come with the commit.
        logprobs = self.logprobs[self.replayed :] if self.logprobs is not None else None
        self._stop_string = session.replay(self.tokens[self.replayed :], logprobs)
        self.replayed = len(self.tokens)

    async def commit(self) -> bool:
        """The tokens are complete. True if the request is live here now, False if the gateway has yet to open it."""
        self.committed = True
        self.renew()
        if self.session is None:
            # The source has let go. A gateway comes at once, unless its client has left: nobody would tell us that.
            self.deadline = time.monotonic() + CLAIM_LIMIT_S
            return False
        await self._finish(self.session)
        return True

    async def _finish_late(self, session: Session) -> None:
        try:
            await self._finish(session)
        except Refused as refusal:
            session.fail(str(refusal))
        except Exception as error:
            logger.exception("resume %s of %s failed", self.resume_id, self.request_id)
            session.fail(f"internal error: {type(error).__name__}")

    async def _finish(self, session: Session) -> None:
        self.replay()
        if self.cached_tokens is not None:
            compat.set_cached_tokens(session.state, self.cached_tokens)
        session.check()
        # Nothing new may be produced before the consumer has taken the replay: vLLM would merge the two.
        timeout_s = COMMIT_TIMEOUT_S + REPLAY_TOKEN_S * session.replay_lag(len(self.tokens))
        if not await _first_of(session.drained, session.closed, timeout_s):
            raise Refused("the destination did not get through the replay")
        ending = await self._start(session)
        if session.open_reply is not None:
            await session.open_reply()
        if ending is not None:
            session.finish_reply(*ending)

    async def _start(self, session: Session) -> tuple[str, int | str | None] | None:
        """Let the engine go on; or how the reply ends, if the tokens that arrived are all that it may have."""
        if self._stop_string is not None:  # As in vLLM, it comes before max_tokens.
            await self._engine("cancel", resume_id=self.resume_id)
            return "stop", self._stop_string
        answer = await self._commit_to_engine()
        if not answer["accepted"]:
            raise Refused(answer["reason"])
        reason = answer["finish"]
        return (str(reason[0]), reason[1]) if reason is not None else None

    async def _commit_to_engine(self) -> dict[str, Any]:
        """What the stages brought the engine is not sent again, unless its reservation has not outlived the wait."""
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        tokens_from = self.engine_tokens
        while True:
            answer: dict[str, Any] = await self._engine(
                "commit",
                resume_id=self.resume_id,
                tokens_from=tokens_from,
                output_token_ids=self.tokens[tokens_from:],
            )
            if answer.get("lacks_tokens") and tokens_from > 0:
                tokens_from = 0
            elif answer.get("compiling") and time.monotonic() < deadline:
                await asyncio.sleep(COMPILING_POLL_S)
            else:
                return answer

    async def close(self, reason: str) -> None:
        """Give up: free what the engine holds, and tell the gateway if it waits."""
        self.closed = True
        async with self.lock:
            await self._engine("cancel", resume_id=self.resume_id)
        if self.session is not None:
            self.session.fail(reason)


async def _first_of(wanted: asyncio.Event, other: asyncio.Event, timeout_s: float) -> bool:
    """Whether ``wanted`` is set before ``other`` is, and in time."""
    waits = [asyncio.create_task(event.wait()) for event in (wanted, other)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return wanted.is_set()
