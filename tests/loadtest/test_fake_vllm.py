"""Fake vLLM servers and a real gateway: whatever happens to a stream, its bytes are those of one that never moved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway import wire
from gateway.policy.decide import Policy
from gateway.policy.migration import MigrationSettings
from loadtest.fake_vllm.__main__ import main
from loadtest.fake_vllm.application import Application
from loadtest.fake_vllm.server import FakeServers, Options
from loadtest.processes import free_port
from loadtest.sim.engine import EngineSettings
from loadtest.sim.profile import FAST, Profile
from tests.conftest import Running, StartGateway, http_client, until, until_true
from tests.fake_instance import MODEL, SECRET
from tests.scripts import normal

TOKENS = 150
LONG = [{"role": "user", "content": "hello " * 100}]
QUICK = FAST.faster(20)
SLOW = FAST.faster(0.1)
"""20 ms a token: so something can happen to a stream. What comes before and after that is quick."""


@contextlib.asynccontextmanager
async def fakes(count: int = 2, **changes: Any) -> AsyncIterator[FakeServers]:
    """Instances f0, f1 and so on, which are empty again at the end."""
    values: dict[str, Any] = {"models": (MODEL,), "secret": SECRET, "instance_ids": "f", "profile": QUICK}
    async with FakeServers(Options(**(values | changes)), [0] * count) as servers:
        yield servers
        engines = [site.instance.engine for site in servers.sites]
        await until(lambda: all(engine.is_empty for engine in engines))
        for engine in engines:
            engine.check()
            assert engine.transfers == 0


def urls(servers: FakeServers) -> dict[str, Any]:
    return {"instance_urls": tuple(servers.urls)}


def pace(servers: FakeServers, profile: Profile) -> None:
    """From each instance's next step on."""
    for site in servers.sites:
        site.instance.engine.profile = profile


def same(data: bytes) -> bytes:
    """The same for every request with that body: each has an id and a time of its own."""
    return re.sub(rb'"created":\d+', b'"created":0', normal(data))


async def unmoved(running: Running, **fields: Any) -> bytes:
    return same(await running.stream(max_tokens=TOKENS, **fields))


class Stream:
    """One under way, and where."""

    def __init__(self, running: Running, servers: FakeServers, **fields: Any) -> None:
        self._running = running
        self._servers = servers
        pace(servers, SLOW)
        self.reading = asyncio.create_task(running.stream(**({"max_tokens": TOKENS} | fields)))
        self.request_id = ""
        self.instance = ""

    async def has_tokens(self, count: int = 5) -> Stream:
        async def look() -> bool:
            assert not self.reading.done(), "it was over too soon"
            live = (await self._running.admin("GET", "/admin/requests")).json()["requests"]
            for one in live:
                self.request_id, self.instance = one["id"], one["instance"]
                return (one["output_tokens"] or 0) >= count
            return False

        await until_true(look, 20)
        return self

    @property
    def index(self) -> int:
        return int(self.instance[1:])

    @property
    def other(self) -> str:
        return "f1" if self.instance == "f0" else "f0"

    async def migrate(self, **order: Any) -> dict[str, Any]:
        body = {"request": self.request_id, "destination": self.other, **order}
        response = await self._running.admin("POST", "/admin/migrate", json=body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    async def bytes(self) -> bytes:
        pace(self._servers, QUICK)
        return same(await self.reading)


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_that_is_moved_there_and_back_is_the_same(
    fields: dict[str, Any], start_gateway: StartGateway
) -> None:
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        fields = {**fields, "messages": LONG}
        expected = await unmoved(running, **fields)
        assert expected.count(b'"finish_reason"') == TOKENS + 1
        stream = await Stream(running, servers, **fields).has_tokens()
        first = await stream.migrate()
        assert (first["outcome"], first["reason"]) == ("committed", None)
        back = await (await stream.has_tokens(first["output_tokens"] + 2)).migrate()
        assert (back["outcome"], back["source_id"]) == ("committed", first["destination_id"])
        assert back["blocks_reused"] > 0, "the blocks that it left behind were sent again"
        assert await stream.bytes() == expected


@pytest.mark.parametrize("method", wire.MIGRATION_METHODS)
async def test_each_method_moves_a_request_and_only_those_that_copy_send_blocks(
    method: str, start_gateway: StartGateway
) -> None:
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        expected = await unmoved(running, messages=LONG)
        stream = Stream(running, servers, messages=LONG)
        result = await (await stream.has_tokens()).migrate(method=method)
        assert result["outcome"] == "committed"
        copied = result["blocks_sent"] + result["blocks_reused"]
        assert (copied > 0) == (method != "recompute")
        assert (result["bytes_sent"] > 0) == (result["blocks_sent"] > 0)
        assert await stream.bytes() == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_reply_in_one_piece_that_is_moved_is_the_same(path: str, start_gateway: StartGateway) -> None:
    body = {"model": MODEL, "prompt": "hello", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        expected = same((await running.client.post(path, json=body)).content)
        pace(servers, SLOW)
        reply = asyncio.create_task(running.client.post(path, json=body))
        engines = [site.instance.engine for site in servers.sites]
        await until(lambda: any(one.output_tokens > 5 for engine in engines for one in engine.requests()))
        (live,) = (await running.admin("GET", "/admin/requests")).json()["requests"]
        other = "f1" if live["instance"] == "f0" else "f0"
        order = {"request": live["id"], "destination": other}
        result = (await running.admin("POST", "/admin/migrate", json=order)).json()
        pace(servers, QUICK)
        assert result["outcome"] == "committed", result
        assert same((await reply).content) == expected


async def test_a_draining_instance_is_emptied_and_the_streams_are_the_same(start_gateway: StartGateway) -> None:
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        expected = await unmoved(running)
        stream = await Stream(running, servers).has_tokens()
        source = servers.sites[stream.index].instance.engine
        answer = await running.admin("POST", f"/admin/instances/{stream.instance}/drain", json={"timeout_s": 20})
        assert answer.json()["empty"] is True, answer.text
        assert source.is_empty
        assert await stream.bytes() == expected


async def test_an_instance_that_is_told_to_end_has_its_requests_moved_away_first(start_gateway: StartGateway) -> None:
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        expected = await unmoved(running)
        stream = await Stream(running, servers).has_tokens()
        source = servers.sites[stream.index]
        await source.llumlet.empty(60.0)
        assert source.instance.engine.is_empty
        assert await stream.bytes() == expected


async def test_the_leader_moves_a_request_away_from_a_full_instance(start_gateway: StartGateway) -> None:
    small = EngineSettings(blocks_total=60, sequence_tokens_max=900)
    full = MigrationSettings(low_freeness_steps=600, high_freeness_steps=700)
    fields = {"messages": [{"role": "user", "content": "word" * 450}], "max_tokens": 400}
    full_again = {"policy": Policy.LLUMNIX, "migration": full}  # Where it goes, it is as full again.
    async with fakes(engine=small) as servers, start_gateway(**urls(servers), **full_again) as running:
        expected = same(await running.stream(**fields))
        stream = Stream(running, servers, **fields)
        pace(servers, FAST.faster(0.03))

        async def has_moved() -> bool:
            live = (await running.admin("GET", "/admin/requests")).json()["requests"]
            return any(move["kind"] == "migrated" for one in live for move in one["moves"])

        await until_true(has_moved, 20)
        assert await stream.bytes() == expected


async def test_an_instance_that_dies_under_a_stream_leaves_it_to_the_other(start_gateway: StartGateway) -> None:
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        expected = await unmoved(running)
        stream = await Stream(running, servers).has_tokens()
        async with http_client(servers.urls[stream.index]) as client:
            with contextlib.suppress(httpx.HTTPError):  # It dies before it can answer.
                await client.post("/fake/faults", json={"die_at_step": 0})
        assert await stream.bytes() == expected


async def test_damaged_blocks_are_noticed_and_the_request_goes_on_where_it_was(start_gateway: StartGateway) -> None:
    async with (
        fakes(faults={"bad_blocks": True}) as servers,
        start_gateway(**urls(servers), policy=Policy.NONE) as running,
    ):
        stream = await Stream(running, servers, messages=LONG).has_tokens()
        result = await stream.migrate()
        assert (result["outcome"], result["reason"]) == ("aborted", "blocks arrived damaged: a checksum is wrong")
        seen = await stream.bytes()
        assert seen == await unmoved(running, messages=LONG), "last, or the destination would have had the blocks"


async def test_a_busy_instance_refuses_and_the_other_serves(start_gateway: StartGateway) -> None:
    async with fakes() as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        servers.sites[0].instance.set_faults({"busy": True})
        response = await running.chat()
        assert response.status_code == 200
        assert servers.sites[1].instance.output_tokens == 8


async def test_queued_requests_wait_in_the_order_of_their_priority() -> None:
    one_by_one = EngineSettings(batch_max=1)
    async with fakes(1, engine=one_by_one, profile=SLOW) as servers, http_client(servers.urls[0]) as client:
        engine = servers.sites[0].instance.engine
        ended: list[str] = []

        async def ask(name: str, priority: int) -> None:
            body = {"model": MODEL, "prompt": name, "max_tokens": 20, "priority": priority}
            await client.post("/v1/completions", json=body)
            ended.append(name)

        asking = []
        for count, (name, priority) in enumerate([("first", 0), ("low", 100), ("normal", 0), ("high", -100)]):
            asking.append(asyncio.create_task(ask(name, priority)))
            await until(lambda count=count: len(engine.requests()) > count)  # type: ignore[misc]
        await asyncio.gather(*asking)
        assert ended == ["first", "high", "normal", "low"]


async def test_a_client_that_leaves_frees_what_it_held() -> None:
    async with fakes(1, profile=SLOW) as servers, http_client(servers.urls[0]) as client:
        engine = servers.sites[0].instance.engine
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5_000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
            assert not engine.is_empty
        await until(lambda: engine.is_empty)
        assert engine.pool.free == engine.settings.blocks_total


async def test_a_resume_with_tokens_that_the_request_never_made_is_refused() -> None:
    """What the gateway has kept is checked here, where a real server would go on from anything."""
    async with fakes(1) as servers, http_client(servers.urls[0]) as client:
        headers = {wire.SECRET_HEADER: SECRET, wire.REQUEST_ID_HEADER: "r", wire.RESUME_HEADER: "m"}
        resume = wire.Resume("r", [1, 2, 3]).to_json()
        assert (await client.put("/llumlet/resumes/m", json=resume, headers=headers)).status_code == 200
        body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "stream": True}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 410
        assert "not those of this request" in answer.text


@pytest.mark.parametrize("tokens", [0, 3, 8])
async def test_a_resume_goes_on_behind_the_tokens_so_far(tokens: int) -> None:
    async with fakes(1) as servers, http_client(servers.urls[0]) as client:
        headers = {wire.SECRET_HEADER: SECRET, wire.REQUEST_ID_HEADER: "r"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "stream": True, "return_token_ids": True}
        events = same((await client.post("/v1/completions", json=body, headers=headers)).content).split(b"\n\n")
        ids = [json.loads(event[6:])["choices"][0]["token_ids"][0] for event in events[:8]]
        resume = wire.Resume("r", ids[:tokens]).to_json()
        await client.put("/llumlet/resumes/m", json=resume, headers=headers)
        answer = await client.post("/v1/completions", json=body, headers=headers | {wire.RESUME_HEADER: "m"})
        assert wire.decode_resumed_header(answer.headers[wire.RESUMED_HEADER]) == ("m", tokens)
        rest = same(answer.content).split(b"\n\n")
        if tokens < 8:
            assert rest == events[tokens:]
        else:
            assert [json.loads(rest[0][6:])["choices"][0][key] for key in ("finish_reason", "token_ids")] == [
                "length",
                [],
            ]
            assert rest[1:] == events[8:]


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "NotFoundError"),
        ({"max_tokens": 0}, 400, "BadRequestError"),
        ({"max_tokens": "8"}, 400, "BadRequestError"),
        ({"max_tokens": 100_000}, 400, "BadRequestError"),
        ({"prompt": []}, 400, "BadRequestError"),
        ({"prompt": {}}, 400, "BadRequestError"),
        ({"n": 2}, 400, "BadRequestError"),
    ],
)
async def test_errors_have_the_shape_of_vllms(fields: dict[str, Any], status: int, kind: str) -> None:
    async with fakes(1) as servers, http_client(servers.urls[0]) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 8, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)


async def test_a_hanging_instance_says_nothing_until_it_hangs_no_longer() -> None:
    async with fakes(1) as servers, http_client(servers.urls[0]) as client:
        assert (await client.post("/fake/faults", json={"hang_after": 0})).status_code == 200
        asking = asyncio.create_task(client.get("/health"))
        await asyncio.wait({asking}, timeout=0.1)
        assert not asking.done()
        assert (await client.post("/fake/faults", json={"hang_after": None})).json()["hang_after"] is None
        assert (await asking).status_code == 200


@pytest.mark.parametrize("changes", [{"unknown": 1}, {"busy": 1}, {"latency_ms": -1}, {"hang_after": True}, []])
async def test_a_fault_that_is_none_is_refused(changes: Any) -> None:
    async with fakes(1) as servers, http_client(servers.urls[0]) as client:
        answer = await client.post("/fake/faults", json=changes)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_fault")


async def test_faults_are_set_from_the_same_machine_only() -> None:
    async with fakes(1) as servers:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"busy": true}', "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/fake/faults", "headers": [], "server": ("h", 1)}
        application = Application({1: servers.sites[0]})
        await application(scope | {"client": ("10.0.0.1", 5)}, receive, send)
        assert sent[0]["status"] == 403
        assert not servers.sites[0].instance.faults.busy


async def test_without_the_plugin_it_is_a_plain_server(start_gateway: StartGateway) -> None:
    async with fakes(has_plugin=False) as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        assert (await running.chat()).status_code == 200
        members = (await running.admin("GET", "/admin/instances")).json()["instances"]
        assert [member["managed"] for member in members if "managed" in member] in ([], [False, False])
        async with http_client(servers.urls[0]) as client:
            assert (await client.get("/llumlet/status")).status_code == 404


async def test_the_llumlets_routes_need_the_secret() -> None:
    async with fakes(1) as servers, http_client(servers.urls[0]) as client:
        for path in ("/llumlet/status", "/fake/blocks"):
            assert (await client.get(path, headers={wire.SECRET_HEADER: "wrong"})).status_code == 401


async def test_many_instances_share_a_process_and_each_reports_for_itself() -> None:
    async with fakes(64) as servers:
        names = []
        for url in (servers.urls[0], servers.urls[31], servers.urls[63]):
            async with (
                http_client(url) as client,
                client.stream("GET", "/llumlet/reports", headers={wire.SECRET_HEADER: SECRET}) as response,
            ):
                report = wire.Report.from_json(json.loads(await anext(response.aiter_lines())))
                names.append(report.instance_id)
        assert names == ["f0", "f31", "f63"]


@pytest.mark.slow
def test_the_command_serves_until_it_is_killed_by_its_fault() -> None:
    command = [sys.executable, "-m", "loadtest.fake_vllm", "--port", str(free_port()), "--die-at-step", "0"]
    ended = subprocess.run(
        command, env=os.environ | {"KVFERRY_SECRET": SECRET}, timeout=120, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_a_port_that_is_taken_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 1
    assert capsys.readouterr().err.startswith("cannot listen: ")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--blocks", "10"], "blocks_total"),
        (["--profile", "nobody"], "no profile"),
        (["--latency-ms", "-1"], "latency_ms"),
        (["--speed", "0"], "--speed"),
    ],
)
def test_the_command_says_which_option_makes_no_sense(
    arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", "s")
    with pytest.raises(SystemExit):
        main(arguments)
    assert word in capsys.readouterr().err
