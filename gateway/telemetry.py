"""Log lines with ids, and a few counters. No prompts, no keys, no client-chosen label values."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

logger = logging.getLogger("kvferry")


def configure_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def log(name: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """One line a decision: ``migrate request=r17 source=a destination=c``."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s %s", name, " ".join(f"{key}={_printable(value)}" for key, value in fields.items()))


def _printable(value: object) -> str:
    text = str(value)
    if text.isprintable() and " " not in text and text:
        return text
    return ascii(text)


class Counters:
    """Counts by fixed names, so that their number stays the same however the clients behave."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def get(self, name: str) -> int:
        return self._counts[name]

    def to_json(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))


async def run_forever(name: str, tick: Callable[[], Awaitable[None]], interval_s: float, counters: Counters) -> None:
    """The top of a background loop: one failed round is logged and counted, and the next one comes all the same."""
    while True:
        try:
            await tick()
        except Exception:
            counters.add(f"{name}_loop_failures")
            logger.exception("%s: a round failed", name)
        await asyncio.sleep(interval_s)


async def cancel_all(loops: Collection[asyncio.Task[None]]) -> None:
    """Waits until they have ended. Asked again, because a library's own time-out can swallow a cancellation."""
    running = set(loops)
    while running:
        for loop in running:
            loop.cancel()
        _, running = await asyncio.wait(running, timeout=0.1)
