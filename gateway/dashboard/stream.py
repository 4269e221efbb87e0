"""``GET /admin/events``: server-sent events, each of them the newest state of one part of what is shown.

While nobody looks, nothing is computed. However many look, each part is computed once, at most so many times a second,
and for at most a small share of the time. A reader who is slow misses what came in between, and gets the newest next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.counters import Counters
from gateway.errors import GatewayError, MethodNotAllowed, Overloaded, ShuttingDown
from gateway.routes import ClientGone, Receive, Scope, while_connected
from gateway.serving.reply import Reply, Send
from gateway.telemetry import cancel_all, run_forever

PATH = "/admin/events"
VIEWERS_MAX = 32
SHARE_MAX = 0.03
"""Of the event loop's time, that one part may take: with very many instances it is looked at less often."""
REST_S_MAX = 5.0
KEEP_ALIVE_S = 5.0
HEADERS = (("content-type", "text/event-stream; charset=utf-8"),)


@dataclass(frozen=True, slots=True)
class Part:
    """One name of events. ``look`` says what JSON can say."""

    name: str
    every_s: float
    look: Callable[[], Awaitable[Any]]


class Events:
    """``began`` is called when somebody looks after nobody did."""

    def __init__(self, parts: Sequence[Part], counters: Counters, began: Callable[[], None]) -> None:
        self._parts = parts
        self._counters = counters
        self._began = began
        self._viewers = 0
        self._newest: dict[str, bytes] = {}
        """By part, its last event. A viewer has it if it is the very object that he was sent last."""
        self._changed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._is_closed = False

    @property
    def viewers(self) -> int:
        return self._viewers

    @property
    def looks(self) -> bool:
        """Whether anything is computed."""
        return bool(self._loops)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            self._check(scope)
        except GatewayError as error:
            await reply.fail(error)
            return
        self._enter()
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(self._show(reply), receive)
        finally:
            self._leave()

    def close(self) -> None:
        """All streams end, and none begins."""
        self._is_closed = True
        self._wake()

    async def stop(self) -> None:
        self.close()
        loops, self._loops = self._loops, []
        await cancel_all(loops)

    def _check(self, scope: Scope) -> None:
        if scope["method"] != "GET":
            raise MethodNotAllowed("This route takes GET only.", "GET")
        if self._is_closed:
            raise ShuttingDown("This gateway is shutting down. Try again.")
        if self._viewers >= VIEWERS_MAX:
            raise Overloaded(f"{VIEWERS_MAX} look at this gateway already.", code="too_many_viewers")

    def _enter(self) -> None:
        self._viewers += 1
        if not self._loops:
            self._began()
            self._loops = [asyncio.create_task(self._run(part)) for part in self._parts]

    def _leave(self) -> None:
        self._viewers -= 1
        if self._viewers == 0:
            for loop in self._loops:
                loop.cancel()
            self._loops, self._newest = [], {}

    async def _run(self, part: Part) -> None:
        await run_forever(f"dashboard_{part.name}", functools.partial(self._look, part), part.every_s, self._counters)

    async def _look(self, part: Part) -> None:
        began_s = time.thread_time()
        said = await part.look()
        data = f"event: {part.name}\ndata: {json.dumps(said, allow_nan=False)}\n\n".encode()
        if data != self._newest.get(part.name):
            self._newest[part.name] = data
            self._wake()
        # What else the thread did while this part waited for others counts too: rather too long a rest than too short.
        await asyncio.sleep(min((time.thread_time() - began_s) / SHARE_MAX, REST_S_MAX))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _show(self, reply: Reply) -> None:
        await reply.start_stream(HEADERS)
        shown: dict[str, bytes] = {}
        while not self._is_closed:
            changed = self._changed
            for name, data in list(self._newest.items()):
                if shown.get(name) is not data:
                    shown[name] = data
                    await reply.write(data)
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await changed.wait()
            except TimeoutError:
                await reply.write(b": nothing new\n\n")
        await reply.end()
