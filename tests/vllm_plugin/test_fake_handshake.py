"""The fake instance and the plugin's own llumlet move requests to each other: both speak the same handshake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway import wire
from loadtest.fake_vllm.server import FakeServers, Options
from loadtest.sim.engine import Request
from loadtest.sim.profile import FAST
from tests.conftest import http_client, until
from tests.fake_instance import MODEL
from tests.vllm_plugin.test_handshake import SECRET, Side, plugin, pytestmark

__all__ = ["plugin", "pytestmark"]

BODY = {"model": MODEL, "prompt": [1] * 6, "max_tokens": 100, "stream": True, "return_token_ids": True}
HEADERS = {wire.SECRET_HEADER: SECRET, wire.REQUEST_ID_HEADER: "r"}
EXPECTED = Request("r", [1] * 6, 100).output_token_ids(0, 100)


def one_fake() -> FakeServers:
    options = Options(models=(MODEL,), secret=SECRET, instance_ids="f", profile=FAST.faster(0.1))
    return FakeServers(options, [0])


async def test_a_request_moves_from_a_fake_to_the_plugin(
    plugin: SimpleNamespace,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(plugin.compat, "replay", lambda *_: None)
    real = Side(plugin, "b")
    async with one_fake() as fakes, real.running(), http_client(fakes.urls[0]) as client:
        engine = fakes.sites[0].instance.engine
        streaming = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=HEADERS))
        await until(lambda: any(request.output_tokens > 2 for request in engine.requests()))
        order = wire.MigrateOrder("r", "b", real.url).to_json()
        moving = asyncio.create_task(client.post("/llumlet/migrate", json=order, headers=HEADERS))
        await until(lambda: real.llumlet._incoming)
        (migration_id,) = real.llumlet._incoming
        session = real.llumlet.open_session("r", migration_id, is_chat=False)
        session.state, session.final_only = SimpleNamespace(num_cached_tokens=0), True
        parked = real.bench.request(resume_id=migration_id)
        session.incoming.attach(session)
        result = (await moving).json()
        assert (result["outcome"], result["reason"]) == ("committed", None)
        ((queued, tokens),) = real.bench.port.queued
        assert (queued, tokens) == (parked, EXPECTED[: result["output_tokens"]])
        last = (await streaming).content.strip().split(b"\n\n")[-1]
        assert wire.decode_comment(last) == wire.Moved(migration_id, "b", result["output_tokens"])
        assert engine.is_empty


async def test_a_request_moves_from_the_plugin_to_a_fake(plugin: SimpleNamespace) -> None:
    real = Side(plugin, "a")
    async with one_fake() as fakes, real.running(), http_client(fakes.urls[0]) as client:
        request = real.bench.request()
        request.max_tokens, request.output_token_ids = 12, EXPECTED[:5]
        session = plugin.session.Session("r", None, None)
        session.reason = None
        detokenizer = SimpleNamespace(num_output_tokens=lambda: 1000)
        session.state = SimpleNamespace(num_cached_tokens=0, detokenizer=detokenizer)
        session._consumer_waits, session._seen_tokens = True, 1000
        streams: list[asyncio.Task[Any]] = []

        def on_comment(comment: wire.StreamComment) -> None:
            if isinstance(comment, wire.Prebind):
                headers = HEADERS | {wire.RESUME_HEADER: comment.migration_id}
                streams.append(asyncio.create_task(client.post("/v1/completions", json=BODY, headers=headers)))

        session.send_comment = on_comment
        real.llumlet._sessions["r"] = session
        result = await real.llumlet.migrate(wire.MigrateOrder("r", "f0", fakes.urls[0]))
        assert (result.outcome, result.reason) == ("committed", None)
        answer = await streams[0]
        assert wire.decode_resumed_header(answer.headers[wire.RESUMED_HEADER]) == (result.migration_id, 5)
        assert answer.text.count("data: ") == 95 + 1
        assert f'"token_ids":[{EXPECTED[5]}]' in answer.text.partition("\n\n")[0]
        assert real.bench.port.live == []
