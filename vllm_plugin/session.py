"""One managed request in this API server: from the HTTP request's arrival to the end of its reply.

A session ties three things together: the ASGI middleware, which holds the reply's bytes; the generator that vLLM's
serving code consumes, which knows which tokens have become bytes; and a migration, in or out. The rule that makes the
seam exact: when the consumer asks for the next output, all bytes of the previous ones have been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from gateway.wire import Busy, Moved, StreamComment
from vllm_plugin import compat, metrics

if TYPE_CHECKING:
    from vllm_plugin.incoming import Incoming

current_session: ContextVar[Session | None] = ContextVar("kvferry_session", default=None)


class ResumeFailed(Exception):
    """The request cannot go on here; the gateway is told so with 410 and tries elsewhere."""


class Session:
    """State of one managed request. ``moved`` and ``failed`` end the reply early, ``live`` opens a resumed one."""

    def __init__(
        self, request_id: str, incoming: Incoming | None, engine_client: Any, *, is_parsed: bool = False
    ) -> None:
        """``is_parsed``: a stream of this kind goes through a parser here, so a replay has to come token by token."""
        self.request_id = request_id
        self.incoming = incoming
        self._is_parsed = is_parsed
        self.reason: str | None = "it has not started"
        """Why the request cannot move, ``None`` if it can."""
        self.state: Any = None
        """The front end's RequestState, once the request is registered there."""
        self.final_only = False
        """Whether the reply is one JSON document: then nothing is sent before the end."""
        self.live = incoming is None
        self.drained = asyncio.Event()
        """Resumed: all that was replayed has been turned into bytes, and dropped."""
        self.ended = asyncio.Event()
        self.closed = asyncio.Event()
        """The HTTP request is over, however it ended."""
        self.moved: Moved | None = None
        self.failed: str | None = None
        self.finished = False
        self.send_comment: Callable[[StreamComment], None] | None = None
        """Set by the middleware while an event stream is under way; does not wait for a slow reader."""
        self.open_reply: Callable[[], Awaitable[None]] | None = None
        """Set by the middleware: send the start of a resumed reply that was held back."""
        self.starts_now = False
        """It is to start at once or not at all: nothing of a reply is sent before the engine has said which."""
        self.busy: Busy | None = None
        """It does not: the reply is that, and nothing else."""
        self._engine_client = engine_client
        self._generations = 0
        self._seen_tokens = 0
        self._consumer_waits = False
        self._leaving: Moved | None = None
        self._replayed: asyncio.Queue[Any] = asyncio.Queue()
        """Outputs that this session gives to the consumer itself; ``None`` ends them. Bounded by max_tokens."""

    def __repr__(self) -> str:
        return f"<Session {self.request_id} live={self.live} tokens={self._seen_tokens} moved={self.moved}>"

    @property
    def moves(self) -> int:
        """How often the request has moved to get here."""
        return self.incoming.moves if self.incoming is not None else 0

    def fail(self, reason: str) -> None:
        """End a resumed reply that has not begun."""
        if not self.ended.is_set():
            self.failed = reason
            self.ended.set()

    def finish_reply(self, reason: str, stop_reason: int | str | None) -> None:
        """The tokens that arrived were all: end the reply as if the last of them had just been made here."""
        compat.finish_reply(self._engine_client, self.state, reason, stop_reason)

    def replay(self, token_ids: list[int], logprobs: list[Any] | None) -> str | None:
        """Take output tokens of before the move through the front end; the stop string that they end in, if they do."""
        if not self._is_parsed or self.final_only:
            return compat.replay(self.state, token_ids, logprobs)
        outputs, stop_string = compat.replay_singly(self.state, token_ids, logprobs)
        for output in outputs:
            self._replayed.put_nowait(output)
        return stop_string

    def replay_lag(self, output_tokens: int) -> int:
        """How many of so many replayed tokens the consumer has not taken yet."""
        return 0 if self.final_only else output_tokens - self._seen_tokens

    @property
    def is_leaving(self) -> bool:
        """Whether a migration away is committed."""
        return self._leaving is not None

    def leave(self, moved: Moved) -> None:
        """The request goes on elsewhere after ``moved.output_tokens``: end the reply when all of them are sent."""
        self._leaving = moved
        self.check()

    def generate(
        self,
        original: Callable[..., AsyncGenerator[Any, None]],
        prompt: Any,
        sampling_params: Any,
        external_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        """vLLM's ``generate`` for this session. Several calls (prompts, beams) make the request one that stays."""
        self._generations += 1
        return self._generate(original, prompt, sampling_params, external_id, options)

    async def _generate(
        self,
        original: Callable[..., AsyncGenerator[Any, None]],
        prompt: Any,
        sampling_params: Any,
        external_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        if self._generations > 1:
            self.reason = "several prompts or beams"
            metrics.stays(self.reason)
            self._refuse_to_resume()
            async for output in original(prompt, sampling_params, external_id, **options):
                yield output
            return
        asks = self._mark(sampling_params)
        # The same id may still be on its way out here: a leg that was closed a moment ago.
        others = compat.front_end_ids(self._engine_client, external_id)
        stream = original(prompt, sampling_params, external_id, **options)
        # The first step registers the request with front end and engine, then waits for output: meanwhile, attach.
        starting = asyncio.ensure_future(anext(stream))
        first: asyncio.Future[Any] | None = starting
        try:
            await self._attach(starting, external_id, others, sampling_params, options)
            if asks:
                await self._hear_verdict()
            while True:
                self._consumer_waits = True
                self.check()
                output = await self._next_replayed()
                if output is None:
                    try:
                        output = await first if first is not None else await anext(stream)
                    except StopAsyncIteration:
                        return
                    first = None
                self._consumer_waits = False
                self._seen_tokens += len(output.outputs[0].token_ids)
                self.finished = self.finished or output.finished
                yield output
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting])
            await stream.aclose()

    async def _next_replayed(self) -> Any:
        """The next output of before the move, where the session gives those itself; ``None``: read vLLM's own."""
        if self.live or not self._is_parsed or self.final_only:
            return None
        await asyncio.sleep(0)  # A long replay must not hold up the streams beside it.
        return await self._replayed.get()

    async def _hear_verdict(self) -> None:
        """The engine has decided, or will before it answers this: it reads its messages in order, and the request came
        first. Does not return if it was refused: the middleware ends the reply then, and this with it."""
        refusal = None
        if self.state is not None:
            operation = {"engine_id": self.state.request_id}
            refusal = await compat.call_engine(self._engine_client, "verdict", operation)
        if refusal is None:
            self.starts_now = False
            if self.open_reply is not None:
                await self.open_reply()
            return
        self.busy = Busy(refusal["needed"], refusal["blocks"], refusal["places"])
        self.ended.set()
        await asyncio.get_running_loop().create_future()

    def _mark(self, sampling_params: Any) -> bool:
        """Whether the engine is asked for a verdict."""
        extra = dict(sampling_params.extra_args or {})
        extra[compat.REQUEST_KEY] = self.request_id
        self.starts_now = self.starts_now and sampling_params.n == 1  # Of several, some might be let in.
        if self.starts_now:
            extra[compat.ADMIT_KEY] = True
        if self.incoming is not None:
            extra[compat.RESUME_KEY] = self.incoming.resume_id
        sampling_params.extra_args = extra
        self.final_only = compat.is_final_only(sampling_params)
        return self.starts_now

    async def _attach(
        self,
        first: asyncio.Future[Any],
        external_id: str,
        others: set[str],
        sampling_params: Any,
        options: dict[str, Any],
    ) -> None:
        while not first.done():
            self.state = compat.front_end_state(self._engine_client, external_id, others)
            if self.state is not None:
                break
            await asyncio.sleep(0)
        else:
            return  # It was refused: whoever awaits ``first`` gets the reason.
        self.reason = compat.why_cannot_move(self._engine_client, sampling_params, options)
        if self.reason is not None:
            metrics.stays(self.reason)
        if self.incoming is not None:
            self._refuse_to_resume()
            self.incoming.attach(self)

    def _refuse_to_resume(self) -> None:
        if self.incoming is not None and self.reason is not None:
            self.fail(self.reason)
            raise ResumeFailed(self.reason)

    def check(self) -> None:
        """Fire what waits for the consumer: a replay that is through, or the move away."""
        incoming = self.incoming
        if not self.live and incoming is not None and incoming.is_replayed and self._has_sent(len(incoming.tokens)):
            self.live = True
            self.drained.set()
            self._replayed.put_nowait(None)
        leaving = self._leaving
        if leaving is not None and self.moved is None and not self.finished and self._has_sent(leaving.output_tokens):
            self.moved = leaving
            self.ended.set()

    def _has_sent(self, output_tokens: int) -> bool:
        """Whether that many tokens have become bytes; a JSON document is only made at the end, so it never lags."""
        return self.final_only or (self._consumer_waits and self._seen_tokens >= output_tokens)
