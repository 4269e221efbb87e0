"""What the middleware lets through of a resumed reply, and when."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

Sent = list[MutableMapping[str, Any]]


@pytest.fixture(scope="module")
def plugin() -> SimpleNamespace:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_plugin import managed, session
    return SimpleNamespace(managed=managed, session=session)


async def reply_of(plugin: SimpleNamespace, *, fails: bool) -> Sent:
    """A resumed stream whose first new event is made in the moment in which the replay is through."""
    session = plugin.session.Session("r", SimpleNamespace(resume_id="m", tokens=[1, 2]), None)
    sent: Sent = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"replayed", "more_body": True})
        session.live = True
        if fails:
            session.fail("no room")
            await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": b"new", "more_body": True})
        await session.open_reply()
        await send({"type": "http.response.body", "body": b"newer", "more_body": False})

    async def keep(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads the request here")

    await plugin.managed.Reply(application, session).run({"type": "http", "headers": []}, receive, keep)
    return sent


async def test_an_output_that_comes_before_the_reply_is_opened_is_not_lost(plugin: SimpleNamespace) -> None:
    """On a busy machine the API server may read the engine's first output together with its answer to the commit."""
    start, *bodies = await reply_of(plugin, fails=False)
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert dict(start["headers"])[b"x-kvferry-resumed"] == b"m 2"
    assert b"".join(body["body"] for body in bodies) == b"newnewer"


async def test_a_reply_that_fails_before_anything_new_is_an_error_status(plugin: SimpleNamespace) -> None:
    start, *_ = await reply_of(plugin, fails=True)
    assert start["status"] == 410
