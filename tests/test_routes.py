"""What clients may call, and what they get for a wrong call."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import pytest

from gateway.config import Limits
from gateway.wire import OWN_REQUEST_ID_HEADER, REQUEST_ID_HEADER, SECRET_HEADER
from tests.conftest import INTERVALS, Running, StartGateway, chat_body, until, until_true
from tests.fake_instance import MODEL, SECRET, Exchange, Generation, instances

JSON = {"content-type": "application/json"}


def assert_openai_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_bad_bodies_are_a_400(start_gateway: StartGateway) -> None:
    bad = [b"", b"  ", b'{"a":', b"[]", b"null", b'"x"', b"1", b"\xff\xfe", b"\x00", b'{"a":1}}', b"[" * 100_000]
    bad += [b'{"a":' * 100_000, b'{"model":5}', b'{"model":"m","x":' + b"9" * 5000 + b"}"]
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in ("/v1/chat/completions", "/v1/completions"):
            for body in bad:
                response = await running.client.post(path, content=body, headers=JSON)
                assert assert_openai_error(response, 400)["type"] == "invalid_request_error", body[:20]
        assert not a.received


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "kv_hints"])
async def test_fields_that_steer_the_engine_are_refused(name: str, start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for value in ({"remote_host": "169.254.169.254"}, None):
            error = assert_openai_error(await running.chat(**{name: value}), 400)
            assert error["param"] == name
        twice = json.dumps(chat_body())[:-1].encode() + b',"%s":{},"%s":null}' % (name.encode(), name.encode())
        response = await running.client.post("/v1/chat/completions", content=twice, headers=JSON)
        assert_openai_error(response, 400)
        for nesting in ("vllm_xargs", "extra_body"):
            assert_openai_error(await running.chat(**{nesting: {name: "x"}}), 400)
        assert_openai_error(await running.chat(vllm_xargs={"kvferry_resume": 1}), 400)
        assert not a.received


async def test_unknown_paths_and_wrong_methods(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in ("/", "/v1", "/v1/nothing", "/llumlet/status", "/metrics/x", "/v1/chat/completions/"):
            assert_openai_error(await running.client.get(path), 404)
        response = await running.client.get("/v1/chat/completions")
        assert_openai_error(response, 405)
        assert response.headers["allow"] == "POST"
        assert_openai_error(await running.client.post("/v1/models"), 405)
        assert_openai_error(await running.admin("GET", "/admin/nothing"), 404)
        assert_openai_error(await running.admin("GET", "/admin/migrate"), 405)


async def test_an_unknown_model_is_a_404_as_vllm_says_it(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        response = await running.chat(model="nope")
        assert_openai_error(response, 404)
        message = "The model `nope` does not exist."
        assert response.json() == {
            "error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
        }


@pytest.mark.parametrize(
    ("change", "why"), [({"draining": True}, "are draining"), ({"sequence": 0}, "No instance can")]
)
async def test_a_known_model_without_a_usable_instance_is_a_503_with_a_time_and_says_when_all_drain(
    change: dict[str, Any], why: str, start_gateway: StartGateway
) -> None:
    intervals = dataclasses.replace(INTERVALS, report_stale_s=0.5)
    async with instances("a") as (a,), start_gateway(a, intervals=intervals) as running:
        a.report_changes = change  # Draining, or a report that never advances and so grows old.

        async def refused() -> bool:
            return (await running.chat()).status_code == 503

        await until_true(refused, 6)
        response = await running.chat(stream=True)
        assert why in assert_openai_error(response, 503)["message"]
        assert int(response.headers["retry-after"]) > 0


async def test_an_instance_that_fails_its_health_check_is_not_used(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        assert (await running.client.get("/health")).status_code == 200
        a.health_status = 503
        await until(lambda: running.gateway.members.healthy_count() == 0)
        assert_openai_error(await running.client.get("/health"), 503)
        assert_openai_error(await running.chat(), 503)
        a.health_status = 200
        await until(lambda: running.gateway.members.healthy_count() == 1)
        assert (await running.chat()).status_code == 200


async def test_a_body_over_the_limit_is_a_413_with_a_length_and_without(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, limits=Limits(body_bytes=1000)) as running:
        body = json.dumps(chat_body(padding="x" * 1000)).encode()

        async def parts() -> Any:
            for at in range(0, len(body), 100):
                yield body[at : at + 100]

        assert_openai_error(await running.client.post("/v1/chat/completions", content=body, headers=JSON), 413)
        assert_openai_error(await running.client.post("/v1/chat/completions", content=parts(), headers=JSON), 413)
        assert (await running.chat()).status_code == 200


async def test_a_body_that_does_not_come_is_a_408(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, limits=Limits(body_s=0.1)) as running:
        url = httpx.URL(running.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
        await asyncio.wait_for(reader.read(), 5)  # The gateway does not wait for the rest.
        assert not running.gateway.sessions.recent()
        writer.close()
        await writer.wait_closed()


async def test_what_is_not_json_by_its_headers_is_refused(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        post = running.client.post
        assert_openai_error(await post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 400)
        compressed = JSON | {"content-encoding": "gzip"}
        assert_openai_error(await post("/v1/completions", content=b"{}", headers=compressed), 415)


async def test_keys_are_asked_for_when_there_are_some(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, api_keys=("key-1", "key-2")) as running:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-1"}, {"x-api-key": "key-1"}):
            response = await running.client.post("/v1/chat/completions", json=chat_body(), headers=header)
            assert assert_openai_error(response, 401)["code"] == "invalid_api_key"
            assert_openai_error(await running.client.get("/v1/models", headers=header), 401)
        for key in ("key-1", "key-2"):
            header = {"authorization": f"Bearer {key}"}
            response = await running.client.post("/v1/chat/completions", json=chat_body(), headers=header)
            assert response.status_code == 200
        assert (await running.client.get("/health")).status_code == 200


async def test_a_clients_secrets_stay_at_the_gateway(start_gateway: StartGateway) -> None:
    names = (
        "authorization",
        "x-api-key",
        "api-key",
        "cookie",
        "proxy-authorization",
        SECRET_HEADER,
        "x-kvferry-resume",
    )
    async with instances("a") as (a,), start_gateway(a, upstream_api_key="upstream") as running:
        headers = dict.fromkeys(names, "canary") | {REQUEST_ID_HEADER: "canary", "connection": "x-foo", "x-foo": "1"}
        response = await running.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        (received,) = a.received
        assert "canary" not in str(received.raw_headers)
        assert "x-foo" not in received.headers
        assert received.headers["authorization"] == "Bearer upstream"
        assert received.headers[SECRET_HEADER] == SECRET
        assert response.headers[OWN_REQUEST_ID_HEADER] == received.headers[REQUEST_ID_HEADER]


async def test_nothing_a_client_sends_becomes_a_credential_or_an_address(start_gateway: StartGateway) -> None:
    names = ("authorization", "x-api-key", "api-key", "cookie", "proxy-authorization", "x-goog-api-key")
    aimed = dict.fromkeys(("api_base", "base_url", "url"), "http://127.0.0.1:9/canary") | {"api_key": "canary"}
    async with instances("a") as (a,), start_gateway(a) as running:
        path = "/v1/chat/completions?api_key=canary&key=canary"
        headers = dict.fromkeys(names, "Bearer canary")
        assert (await running.client.post(path, json=chat_body(**aimed), headers=headers)).status_code == 200
        (received,) = a.received
        assert "canary" not in str(received.raw_headers) + received.path
        assert "authorization" not in received.headers
        refused = await running.client.post(path, json=chat_body(model="x"), headers=headers)
        models = await running.client.get("/v1/models?key=canary", headers=headers)
        assert "canary" not in refused.text + models.text
        assert (await running.chat()).status_code == 200
        assert "canary" not in str(a.received[1])


async def test_every_request_gets_an_id_of_its_own(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        ids = set()
        for client_id in ("same", "same", "x" * 50_000, "\xe9"):
            headers = {REQUEST_ID_HEADER.encode(): client_id.encode("latin-1")}
            response = await running.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
            ids.add(response.headers[OWN_REQUEST_ID_HEADER])
        assert len(ids) == 4
        assert all(len(one) == 32 for one in ids)
        assert {received.headers[REQUEST_ID_HEADER] for received in a.received} == ids


async def test_a_client_is_told_its_own_id_back_as_far_as_it_is_safe(start_gateway: StartGateway) -> None:
    said = [("r-1", "r-1"), ("x" * 50_000, "x" * 64), ("a b<\xe9>;c", "abc"), ("", None), ("\xe9", None)]
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in ("/v1/chat/completions", "/tokenize", "/v1/models"):
            for client_id, expected in said:
                headers = {REQUEST_ID_HEADER.encode(): client_id.encode("latin-1")}
                method = "GET" if path == "/v1/models" else "POST"
                body = None if method == "GET" else chat_body()
                response = await running.client.request(method, path, json=body, headers=headers)
                own = response.headers[OWN_REQUEST_ID_HEADER]
                assert response.headers.get_list(REQUEST_ID_HEADER) == [expected or own]
                assert len(own) == 32
        assert not {"r-1", "abc", "x" * 64} & {received.headers[REQUEST_ID_HEADER] for received in a.received}


async def test_headers_of_the_connection_end_at_the_gateway(start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        headers = {"connection": "x-hop", "x-hop": "1", "keep-alive": "5", "x-kvferry-x": "1", "x-kept": "1"}
        await exchange.json(200, {"ok": True}, headers | {REQUEST_ID_HEADER: "theirs"})

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        response = await running.chat()
        assert response.json() == {"ok": True}
        assert response.headers["x-kept"] == "1"
        for name in ("x-hop", "keep-alive", "x-kvferry-x", "transfer-encoding"):
            assert name not in response.headers
        assert response.headers.get_list("content-length") == ["12"]
        assert response.headers[REQUEST_ID_HEADER] != "theirs"


async def test_event_streams_are_marked_as_not_to_be_buffered(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        response = await running.chat(stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in response.headers


async def test_a_body_reaches_the_instance_with_its_values_as_they_were(start_gateway: StartGateway) -> None:
    body = (
        b'{"model":"kvferry-test","messages":[],"seed":9007199254740993,"temperature":1e-7,"big":'
        + b"7" * 400
        + b',"one":1.0,"none":null,"zz":{"a":[1,null]},"priority":-3,"stream":true,"stop":"\\ud83d\\ude00"}'
    )
    async with instances("a") as (a,), start_gateway(a) as running:
        await running.client.post("/v1/chat/completions", content=body, headers=JSON)
        (received,) = a.received
        expected = body.replace(b',"priority":-3', b"")[:-1] + b',"return_token_ids":true}'
        assert received.body == expected
        plain = b'{ "model" : "kvferry-test" , "prompt" : [1, 2] }'
        await running.client.post("/v1/completions", content=plain, headers=JSON)
        assert json.loads(a.received[1].body) == json.loads(plain)


async def test_tokens_that_were_not_asked_for_do_not_appear(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for fields in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
            data = await running.stream(**fields)
            for event in data.split(b"\n\n"):
                if event.startswith(b"data: {"):
                    value = json.loads(event[6:])
                    assert value.get("prompt_token_ids") is None
                    assert value["choices"][0].get("token_ids") is None
        assert b'"token_ids":[1000]' in await running.stream(return_token_ids=True)


async def test_an_event_without_text_that_only_carries_tokens_is_not_shown(start_gateway: StartGateway) -> None:
    """A parser that is not ready to say anything: vLLM sends such an event only because token ids were asked for."""

    async def script(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        empty = b'"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[77]'
        await exchange.start()
        await exchange.send(generation.role(), b'data: {"created":1,"choices":[{"index":0,' + empty + b"}]}\n\n")
        await exchange.send(*generation.rest(0))
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        unmoved = await running.stream()
        a.script = script
        assert len(await running.stream()) == len(unmoved)
        assert b"[77]" in await running.stream(return_token_ids=True)


async def test_models_are_a_stable_union(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        a.models, b.models = ("zeta", MODEL), ("alpha", MODEL)
        async with start_gateway(a, b) as running:
            first = await running.client.get("/v1/models")
            assert [card["id"] for card in first.json()["data"]] == ["alpha", MODEL, "zeta"]
            assert first.json()["object"] == "list"
            await b.stop()
            await until(lambda: running.gateway.members.healthy_count() == 1)
            assert (await running.client.get("/v1/models")).content == first.content
            assert_openai_error(await running.chat(model="alpha"), 503)
            await b.listen()


async def test_a_model_is_asked_of_the_instances_that_serve_it(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        b.models = (MODEL, "lora1")
        async with start_gateway(a, b) as running:
            for _ in range(5):
                assert (await running.chat(model="lora1")).status_code == 200
            assert (len(a.received), len(b.received)) == (0, 5)


async def test_nothing_known_yet_is_a_503(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,):
        await a.stop()
        async with start_gateway(a) as running:
            assert_openai_error(await running.client.get("/v1/models"), 503)
            assert_openai_error(await running.chat(), 503)
            assert_openai_error(await running.client.get("/health"), 503)
        await a.listen()


async def test_the_status_comes_before_the_first_event_of_a_slow_stream(start_gateway: StartGateway) -> None:
    begin = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await begin.wait()
        await exchange.send(*Generation(exchange.request).rest())
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            assert response.status_code == 200
            begin.set()
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("size", [200_000, 8_000_000])
async def test_a_large_event_is_forwarded_whole(size: int, start_gateway: StartGateway) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * size + b'"}}]}\n\n'

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(event, b"data: [DONE]\n\n")
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        assert await running.stream() == event + b"data: [DONE]\n\n"


async def test_comments_of_ours_never_reach_the_client(start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(b": kvferry later 1 2 3\n\n", b": ping\n\n", b": kvferry unbind m9\n\n")
        await exchange.send(*Generation(exchange.request).rest())
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        data = await running.stream()
        assert b"kvferry unbind" not in data
        assert b": kvferry" not in data
        assert data.startswith(b": ping\n\n")


async def all_at_once(running: Running, count: int) -> list[httpx.Response]:
    return await asyncio.gather(*(running.chat() for _ in range(count)))


async def test_requests_sent_together_spread_although_no_report_knows_of_them(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        a.freeness_steps = b.freeness_steps = 8000
        async with start_gateway(a, b) as running:
            assert {response.status_code for response in await all_at_once(running, 20)} == {200}
            assert abs(len(a.received) - len(b.received)) <= 2
