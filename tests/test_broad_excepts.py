"""The two places that catch everything: the top of a loop, and the top of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any, cast

import pytest

from gateway.access import Keys
from gateway.admission import Admission
from gateway.cluster.limits import Limiter
from gateway.cluster.members import Members
from gateway.cluster.store import Store
from gateway.config import Limits
from gateway.counters import Counters
from gateway.openai.caps import Caps
from gateway.routes import Routes
from gateway.serving.forward import Forwarder
from gateway.serving.serve import Server
from gateway.telemetry import cancel_all, run_forever


async def test_a_loop_outlives_a_round_that_fails_and_counts_it() -> None:
    counters = Counters()
    rounds: list[int] = []
    enough = asyncio.Event()

    async def tick() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 3:
            enough.set()
        raise RuntimeError("a bug")

    loop = asyncio.create_task(run_forever("test", tick, 0, counters))
    await asyncio.wait_for(enough.wait(), 5)
    await cancel_all([loop])
    assert counters.get("loop_failures", loop="test") >= 2


async def test_a_loop_that_swallows_a_cancellation_is_asked_again() -> None:
    async def swallows() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    loop = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel_all([loop]), 5)
    assert loop.cancelled()


class BrokenServer:
    async def serve(self, *_: object) -> None:
        raise RuntimeError("a bug, with a secret in it")


async def test_a_bug_of_ours_is_an_honest_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    server = cast(Server, BrokenServer())
    limiter = Limiter(Store("redis://127.0.0.1:1/0"), 0.1, counters)
    admission = Admission(Keys([], open_if_empty=True), limiter, Caps(), sends_priority=True)
    routes = Routes(server, cast(Forwarder, server), Members(1.0), admission, Limits(), counters)
    sent: list[MutableMapping[str, Any]] = []
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    await routes({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["type"] == "InternalServerError"
    assert b"secret" not in sent[1]["body"]
    assert counters.get("internal_errors") == 1
    assert "a bug" in caplog.text
