"""What the middleware lets through of a resumed reply, and of one that was to start at once, and when."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncGenerator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import wire

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

    await plugin.managed.Reply(application, session, "boot-1").run({"type": "http", "headers": []}, receive, keep)
    return sent


async def test_an_output_that_comes_before_the_reply_is_opened_is_not_lost(plugin: SimpleNamespace) -> None:
    """On a busy machine the API server may read the engine's first output together with its answer to the commit."""
    start, *bodies = await reply_of(plugin, fails=False)
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert dict(start["headers"])[b"x-kvferry-resumed"] == b"m 2"
    assert dict(start["headers"])[b"x-kvferry-boot"] == b"boot-1"
    assert b"".join(body["body"] for body in bodies) == b"newnewer"


async def test_a_reply_that_fails_before_anything_new_is_an_error_status(plugin: SimpleNamespace) -> None:
    start, *_ = await reply_of(plugin, fails=True)
    assert start["status"] == 410


class Front:
    """As much of vLLM's front end as one request meets: it is registered, and its engine gives a verdict."""

    def __init__(self, refusal: dict[str, Any] | None) -> None:
        self.refusal = refusal
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.params: Any = None
        self.ended = False
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={}, stream_interval=1)
        resources = SimpleNamespace(engine_dead=False)
        self.engine_core = SimpleNamespace(call_utility_async=self.call, resources=resources)

    async def call(self, _: str, operation: str, payload: dict[str, Any]) -> Any:
        self.asked.append((operation, payload))
        return self.refusal

    async def generate(self, _: Any, params: Any, external_id: str) -> AsyncGenerator[Any, None]:
        self.params = params
        self.output_processor.external_req_ids[external_id] = ["internal"]
        self.output_processor.request_states["internal"] = SimpleNamespace(request_id="internal")
        try:
            await asyncio.sleep(0.01)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])], finished=True)
        finally:
            self.ended = True


async def started_now(plugin: SimpleNamespace, front: Front, *, stream: bool, n: int = 1) -> Sent:
    from vllm.sampling_params import SamplingParams

    session = plugin.session.Session("r", None, front)
    session.starts_now = True
    sent: Sent = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        if stream:  # As vLLM does it: the head is sent before the engine is asked.
            await send(start)
        async for _ in session.generate(front.generate, "prompt", SamplingParams(max_tokens=1, n=n), "r", {}):
            if stream:
                await send({"type": "http.response.body", "body": b"event", "more_body": True})
        if not stream:
            await send(start)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async def keep(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads the request here")

    await plugin.managed.Reply(application, session, "boot-1").run({"type": "http", "headers": []}, receive, keep)
    return sent


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_cannot_start_now_is_answered_with_that_alone(
    stream: bool, plugin: SimpleNamespace
) -> None:
    front = Front({"needed": 12, "blocks": 3, "places": 1})
    start, body = await started_now(plugin, front, stream=stream)
    assert front.asked == [("verdict", {"engine_id": "internal"})]
    assert start["status"] == wire.BUSY_STATUS
    busy = wire.decode_busy_header(dict(start["headers"])[wire.BUSY_HEADER.encode()].decode())
    assert busy == wire.Busy(12, 3, 1)
    assert json.loads(body["body"])["error"]["code"] == "busy"
    assert front.ended, "the front end has forgotten it too"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_starts_now_has_the_reply_that_it_would_have_had(
    stream: bool, plugin: SimpleNamespace
) -> None:
    front = Front(None)
    start, *bodies = await started_now(plugin, front, stream=stream)
    assert start["status"] == 200
    assert b"".join(body["body"] for body in bodies) == (b"eventend" if stream else b"end")
    assert front.params.extra_args["kvferry_admit"] is True


async def test_of_several_sequences_none_is_asked_whether_it_can_start(plugin: SimpleNamespace) -> None:
    front = Front({"needed": 12, "blocks": 3, "places": 1})
    start, *_ = await started_now(plugin, front, stream=True, n=2)
    assert start["status"] == 200
    assert front.asked == []
    assert "kvferry_admit" not in front.params.extra_args


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({wire.ADMIT_HEADER: wire.ADMIT_NOW}, wire.BUSY_STATUS),
        ({wire.ADMIT_HEADER: "later"}, 200),
        ({}, 200),
    ],
)
async def test_a_full_instance_says_so_before_it_reads_the_prompt(
    headers: dict[str, str], status: int, plugin: SimpleNamespace
) -> None:
    sent: Sent = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the prompt was read")

    async def keep(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    def open_session(request_id: str, resume_id: str | None, **_: Any) -> Any:
        return plugin.session.Session(request_id, None, None)

    llumlet = SimpleNamespace(
        boot_id="boot-1",
        why_full=lambda: wire.Busy(None, 0, 5),
        open_session=open_session,
        close_session=lambda session: None,
    )
    owner = SimpleNamespace(settings=SimpleNamespace(secret="s"), llumlet=llumlet)
    all_headers = {wire.SECRET_HEADER: "s", wire.REQUEST_ID_HEADER: "r"} | headers
    scope = {
        "type": "http",
        "path": "/v1/completions",
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
    }
    await plugin.managed.ManagedRequests(application, owner)(scope, receive, keep)
    assert sent[0]["status"] == status
    if status == wire.BUSY_STATUS:
        assert dict(sent[0]["headers"])[wire.BUSY_HEADER.encode()] == b"- 0 5"
