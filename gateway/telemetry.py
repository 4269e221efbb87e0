"""Log lines with ids, as text or as JSON, and the background loops. No prompts, no keys."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from gateway.counters import Counters

logger = logging.getLogger("kvferry")


def configure_logging(level: str, log_format: str = "text") -> None:
    """``log_format``: text or json. Libraries are heard from warnings on: below that they may quote a request."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``event`` and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{seconds}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line["logger"] = record.name
        match record.args:
            case (str(event), Fields() as fields):
                line |= {"event": event, **fields.values}
            case _:
                line |= {"event": "message", "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Fields:
    """Written out as text only if a line of text is what is asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{key}={_printable(value)}" for key, value in self.values.items())


def log(name: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """One line a decision: ``migrate request=r17 source=a destination=c``."""
    if logger.isEnabledFor(level):
        # Not by `logger.log`, which looks for the line of code that has called it.
        logger.handle(logger.makeRecord(logger.name, level, __file__, 0, "%s %s", (name, Fields(fields)), None))


class Changes:
    """Log lines on changes of state only: what is gone is one line, not one a round."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def __call__(
        self, name: str, state: str, /, *, target: str = "", reason: str = "", level: int = logging.INFO
    ) -> None:
        """One line if ``state`` is another one than the last time for this name and target, whatever the reason."""
        if self._states.get(name + target) != state:
            self._states[name + target] = state
            words = {"target": target, "state": state, "reason": reason}
            log(name, level=level, **{word: said for word, said in words.items() if said})


def _printable(value: object) -> str:
    text = "-" if value is None else str(value)
    if text.isprintable() and " " not in text and text:
        return text
    return ascii(text)


async def run_forever(
    name: str, tick: Callable[[], Awaitable[None]], interval_s: float, counters: Counters, first_s: float = 0.0
) -> None:
    """The top of a background loop: one failed round is logged and counted, and the next one comes all the same.

    ``first_s``: until the first round. Hundreds of loops that begin together would else go on in step for ever.
    """
    await asyncio.sleep(first_s)
    while True:
        try:
            await tick()
        except Exception:
            counters.add("loop_failures", loop=name)
            logger.exception("%s: a round failed", name)
        await asyncio.sleep(interval_s)


async def cancel_all(loops: Collection[asyncio.Task[None]]) -> None:
    """Waits until they have ended. Asked again, because a library's own time-out can swallow a cancellation."""
    running = set(loops)
    while running:
        for loop in running:
            loop.cancel()
        _, running = await asyncio.wait(running, timeout=0.1)
