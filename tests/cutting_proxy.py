"""A TCP proxy that cuts, refuses or falls silent: a network between any two parts, under a test's control."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CuttingProxy:
    """Its connections can be cut all at once. While ``refusing`` it takes no new ones; while ``passes`` is cleared
    nothing goes through and nobody is told, as where a cable is pulled or packets are dropped."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self.refusing = False
        self.passes = asyncio.Event()
        self.passes.set()
        self.answers_pass = asyncio.Event()
        """Cleared: what comes from the target does not, though the target hears all: a cut in one direction."""
        self.answers_pass.set()
        self.answers_late_s = 0.0
        self.port = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[CuttingProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            yield self
        finally:
            self.passes.set()
            self.answers_pass.set()
            server.close()
            self.cut()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def lose(self) -> None:
        """As where the machine behind it has gone."""
        self.refusing = True
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, upstream_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer, back=True))
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._gate(back)
                writer.write(data)
                await writer.drain()
        await self._gate(back)
        if writer.can_write_eof() and not writer.transport.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _gate(self, back: bool) -> None:
        await self.passes.wait()
        if back:
            await asyncio.sleep(self.answers_late_s)
            await self.answers_pass.wait()
