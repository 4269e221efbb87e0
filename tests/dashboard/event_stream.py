"""A reader of ``/admin/events``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tests.conftest import ADMIN_KEY, Running

COMES_IN_S = 30.0


class EventStream:
    def __init__(self, response: httpx.Response) -> None:
        self._blocks = _blocks(response)
        self.newest: dict[str, Any] = {}

    async def until(self, is_so: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Reads on until the newest of each part are so."""
        async with asyncio.timeout(COMES_IN_S):
            while not is_so(self.newest):
                name, said = await anext(self._blocks)
                self.newest[name] = said
        return self.newest


@contextlib.asynccontextmanager
async def watching(running: Running) -> AsyncIterator[EventStream]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with running.client.stream("GET", "/admin/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield EventStream(response)


async def _blocks(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    unread = ""
    async for text in response.aiter_text():
        *blocks, unread = (unread + text).split("\n\n")
        for block in blocks:
            lines = dict(line.split(": ", 1) for line in block.splitlines())
            if "event" in lines:
                yield lines["event"], json.loads(lines["data"])
