"""Looks a name up in a thread of its own. A look-up cannot be called off, and may hang for as long as its servers do:
in a shared pool a few such names would keep every other one waiting, those of Redis and of the instances too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any


async def resolve(host: str, port: int) -> Sequence[str]:
    """URLs of all its addresses. Raises ``OSError``, and ``ValueError`` for what cannot be a name. Who cancels it goes
    on at once; the thread ends when the look-up does, and holds up no end of the process."""
    found = await _in_thread(host, port)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}" for one in hosts]


def _in_thread(host: str, port: int) -> asyncio.Future[list[tuple[Any, ...]]]:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[tuple[Any, ...]]] = loop.create_future()

    def take(found: list[tuple[Any, ...]] | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found or [])

    def look() -> None:
        found: list[tuple[Any, ...]] | None = None
        failed: Exception | None = None
        try:
            found = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(take, found, failed)

    threading.Thread(target=look, name=f"resolve {host}", daemon=True).start()
    return answer
