"""The metrics of all workers on one page: a scrape of their port reaches one of them, and that one asks the others.

Each worker tells its part to whoever connects to its Unix socket. The parent has made those, in a directory that only
its user can enter. A worker that does not answer is left out, and the page says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PART_S = 2.0
"""For another worker's part: while that starts, or stands still, the page comes without it."""
PART_BYTES_MAX = 64 * 1024 * 1024

Part = list[Any]
"""What a worker has to say, as JSON can say it."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place among its siblings, as its parent gives it."""

    index: int
    paths: tuple[str, ...]
    """Of all workers' sockets."""
    listening: socket.socket
    """The one at ``paths[index]``."""


class WorkerPages:
    def __init__(self, seat: Seat, own: Callable[[], Part]) -> None:
        self._seat = seat
        self._own = own
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._tell, sock=self._seat.listening)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def all(self) -> list[Part | None]:
        """The parts of all workers in their order; ``None`` where one did not come."""
        return await asyncio.gather(*(self._part(index) for index in range(len(self._seat.paths))))

    async def _part(self, index: int) -> Part | None:
        if index == self._seat.index:
            return self._own()
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(PART_S):
                return await _ask(self._seat.paths[index])
        return None

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Beside the event loop, as the page itself is written: streams go on meanwhile.
        data = await asyncio.to_thread(_encoded, self._own())
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):  # Whoever has asked may be gone.
            writer.write(len(data).to_bytes(8) + data)
            await writer.drain()


async def _ask(path: str) -> Part:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        size = int.from_bytes(await reader.readexactly(8))
        if size > PART_BYTES_MAX:
            raise ValueError(f"a part of {size} bytes")
        part: Part = await asyncio.to_thread(json.loads, await reader.readexactly(size))
        return part
    finally:
        writer.close()


def _encoded(part: Part) -> bytes:
    return json.dumps(part).encode()
