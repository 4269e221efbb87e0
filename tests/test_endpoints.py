"""Requests that are passed on: every public endpoint of vLLM, and nothing else of it."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
import pytest

from gateway.config import Budgets, Limits
from gateway.endpoints import ENDPOINTS, Kind
from gateway.wire import OWN_REQUEST_ID_HEADER, REQUEST_ID_HEADER
from tests.conftest import INTERVALS, Running, StartGateway, until
from tests.fake_instance import MODEL, Exchange, FakeInstance, Script, error_body, instances
from tests.scripts import gone, resets, silent
from tests.test_routes import assert_openai_error

JSON = {"content-type": "application/json"}
FORWARDS = [one.path for one in ENDPOINTS if one.kind in (Kind.FORWARD, Kind.RESPOND)]
UPLOADS = [one.path for one in ENDPOINTS if one.kind is Kind.UPLOAD]
STREAMS = ["/v1/responses", "/v1/messages"]
ODD_BODY = (
    b'{ "model" : "kvferry-test",\r\n "input":["a",[1,2]], "seed":9007199254740993, "t":1e-7, "t":1.0, "none":null,'
    b' "zz_future":{"a":[1,null]}, "text":"\\ud83d\\ude00" }\n'
)
RESPONSE_EVENTS = [
    b'event: response.created\ndata: {"response":{"id":"resp_1","status":"queued"},"sequence_number":0}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":"data: x\\n\\n","sequence_number":1}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":"y","sequence_number":2}\n\n',
    b'event: response.completed\ndata: {"response":{"id":"resp_1"},"sequence_number":3}\n\n',
]
MESSAGE_EVENTS = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"}}\n\n',
    b'event: ping\ndata: {"type":"ping"}\n\n',
    'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"你好 👩‍👩‍👧"}}\n\n'.encode(),
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]
EVENTS = dict(zip(STREAMS, (RESPONSE_EVENTS, MESSAGE_EVENTS), strict=True))


def whole(
    body: bytes, status: int = 200, content_type: str = "application/json", headers: dict[str, str] | None = None
) -> Script:
    async def script(exchange: Exchange) -> None:
        length = {"content-length": str(len(body))}
        await exchange.start(status, length | (headers or {}), content_type=content_type, chunked=False)
        await exchange.raw(body)

    return script


def streams(*parts: bytes, end: str = "finish") -> Script:
    """Each part one chunk. ``end``: "finish", "cut", or "wait" until the client goes."""

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*parts)
        if end == "wait":
            await exchange.client_gone.wait()
        else:
            await (exchange.cut() if end == "cut" else exchange.finish())

    return script


async def post(running: Running, path: str, **fields: Any) -> httpx.Response:
    return await running.client.post(path, json={"model": MODEL, **fields})


def idle(running: Running, *fakes: FakeInstance) -> bool:
    return not any(running.gateway.dispatcher.in_flight(fake.instance_id) for fake in fakes)


@pytest.mark.parametrize("path", FORWARDS)
async def test_body_and_reply_pass_byte_for_byte(path: str, start_gateway: StartGateway) -> None:
    answer = b'{"id":"x", "data":[1.0,-Infinity, 1e400],\r\n"n":null}\n'
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = whole(answer, headers={"x-kept": "1", "connection": "x-hop", "x-hop": "1"})
        response = await running.client.post(path, content=ODD_BODY, headers=JSON | {"cookie": "c", "te": "trailers"})
        assert (response.status_code, response.content) == (200, answer)
        assert response.headers["x-kept"] == "1"
        assert "x-hop" not in response.headers
        (received,) = a.received
        assert (received.method, received.path, received.body) == ("POST", path, ODD_BODY)
        assert not {"cookie", "te", "authorization"} & set(received.headers)
        assert received.headers["accept-encoding"] == "identity"
        assert received.headers[REQUEST_ID_HEADER] == response.headers[OWN_REQUEST_ID_HEADER]
        assert idle(running, a)


ADMINISTRATIVE = (
    "/v1/load_lora_adapter /v1/unload_lora_adapter /sleep /wake_up /is_sleeping /reset_prefix_cache /reset_mm_cache "
    "/reset_encoder_cache /collective_rpc /load /server_info /start_profile /stop_profile /pause /resume "
    "/abort_requests /update_weights /scale_elastic_ep /inference/v1/generate /invocations /tokenizer_info /docs "
    "/kv_event_sources /v1/chat/completions/render /v1/completions/derender /fault_tolerance/apply /llumlet/status "
    "/v1/realtime /v1/responses/x/y /v1/responses/ /v1/responses/a/b/cancel //tokenize /tokenize/ /TOKENIZE "
    "/v1/../sleep /v1/%2e%2e/metrics /v1/responses/..%2f..%2fmetrics /health/x"
).split()


async def test_what_is_not_in_the_table_never_reaches_an_instance(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in ADMINISTRATIVE:
            for method in ("GET", "POST"):
                request = httpx.Request(method, running.url + path, json={}, headers=JSON)
                request.url = request.url.copy_with(raw_path=path.encode())
                response = await running.client.send(request)
                assert response.status_code in (404, 405), path
                assert response.json()["error"]["message"]
        for endpoint in ENDPOINTS:
            for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {
                one.method for one in ENDPOINTS if one.path == endpoint.path
            }:
                response = await running.client.request(method, endpoint.path)
                assert response.status_code == 405
                assert endpoint.method in response.headers["allow"].split(", ")
        assert not a.received


async def test_health_is_the_gateways_own_and_needs_no_key(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, api_keys=("k",)) as running:
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/openapi.json")):
            assert (await running.client.request(method, path)).status_code == 200
        assert (await running.client.get("/version")).status_code == 401
        assert not a.received


async def test_the_version_is_what_an_instance_says(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = whole(b'{"version":"0.32.0"}')
        assert (await running.client.get("/version?x=1")).json() == {"version": "0.32.0"}
        assert (a.received[0].method, a.received[0].path) == ("GET", "/version")


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "kv_hints"])
async def test_fields_that_steer_the_engine_are_refused_everywhere(name: str, start_gateway: StartGateway) -> None:
    aimed = b'{"remote_host":"169.254.169.254"}'
    bodies = [
        b'{"model":"kvferry-test","%s":%s}',
        b'{"%s":%s,"model":"kvferry-test"}',
        b'{"vllm_xargs":{"%s":%s}}',
        b'{"extra_body":{"%s":%s}}',
        b'{"extra_body":{"extra_body":{"vllm_xargs":{"%s":%s}}}}',
        b'{"extra_body":{"vllm_xargs":{},"extra_body":{"%s":%s}},"extra_body":{}}',
    ]
    escaped = "".join(f"\\u{ord(char):04x}" for char in name).encode()
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in (*FORWARDS, "/v1/completions"):
            for body in (*(body % (name.encode(), aimed) for body in bodies), bodies[0] % (escaped, b"null")):
                response = await running.client.post(path, content=body, headers=JSON)
                assert response.status_code == 400, (path, body)
                assert name in response.json()["error"]["message"]
        for path in UPLOADS:
            for field in ({name: "{}"}, {f"{name}[remote_host]": "x"}, {"vllm_xargs": json.dumps({name: {}})}):
                response = await running.client.post(path, data=field, files={"file": b"x"})
                assert response.status_code == 400, (path, field)
        assert not a.received


async def test_what_a_kv_connector_says_is_not_told(start_gateway: StartGateway) -> None:
    said = b'{"type":"x","text":"\\"kv_transfer_params\\":{}","kv_transfer_params":%s}'
    told, kept = said % b'{"remote_host":"10.0.0.7"}', said % b"null"
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in STREAMS:
            a.script = whole(told)
            assert (await post(running, path)).content == kept
            last = EVENTS[path][-1]
            a.script = streams(b"data: " + told + b"\n\n", last)
            assert (await post(running, path, stream=True)).content == b"data: " + kept + b"\n\n" + last


async def test_fields_that_are_the_gateways_own_are_dropped_and_only_those(start_gateway: StartGateway) -> None:
    body = b'{"model":"kvferry-test", "priority":-5,"request_id":"resp_mine", "seed":9007199254740993 ,"input":"x"}'
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = whole(b"{}")
        for path in ("/v1/responses", "/v1/embeddings"):
            await running.client.post(path, content=body, headers=JSON)
            assert a.received[-1].body == b'{"model":"kvferry-test","seed":9007199254740993,"input":"x"}'


async def test_a_refusal_comes_through_once_and_as_it_is(start_gateway: StartGateway) -> None:
    kinds = [("application/json", b'{"error": {"message":"no"} }'), ("text/plain", b"no \xff")]
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        for status, (kind, body) in itertools.product((400, 401, 404, 413, 422, 429, 501), kinds):
            a.script = b.script = whole(body, status, kind, {"retry-after": "7"})
            for path in ("/v1/embeddings", *STREAMS):
                response = await post(running, path, stream=True)
                assert (response.status_code, response.content) == (status, body)
                assert (response.headers["content-type"], response.headers["retry-after"]) == (kind, "7")
        assert len(a.received) + len(b.received) == 7 * len(kinds) * 3
        assert running.gateway.counters.get("legs_lost") == 0


@pytest.mark.parametrize("path", STREAMS)
async def test_events_keep_their_names_and_order_however_their_bytes_are_cut(
    path: str, start_gateway: StartGateway
) -> None:
    stream = b"".join(EVENTS[path])
    cuts = [[stream[:at], stream[at:]] for at in range(1, len(stream), 41)]
    async with instances("a") as (a,), start_gateway(a) as running:
        for parts in ([stream], [bytes([byte]) for byte in stream], *cuts):
            a.script = streams(*parts)
            response = await running.client.post(
                path, json={"model": MODEL, "stream": True}, headers={"accept-encoding": "gzip"}
            )
            assert response.content == stream, parts[0]
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            assert "content-encoding" not in response.headers


async def test_a_cut_response_ends_in_an_error_event_of_its_own_shape(start_gateway: StartGateway) -> None:
    sent = RESPONSE_EVENTS[:3]
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        for end in ("cut", "finish"):
            a.script = streams(*sent, b'event: response.output_text.delta\ndata: {"delta":"st', end=end)
            data = (await post(running, "/v1/responses", stream=True)).content
            assert data.startswith(b"".join(sent) + b"event: error\ndata: ")
            value = json.loads(data.removeprefix(b"".join(sent) + b"event: error\ndata: "))
            assert (value["type"], value["code"], value["param"]) == ("error", "502", None)
            assert value["sequence_number"] == 3
            assert value["message"]
            assert b"[DONE]" not in data
        assert not b.received


async def test_a_cut_message_ends_in_anthropics_error_event(start_gateway: StartGateway) -> None:
    sent = b"".join(MESSAGE_EVENTS[:3])
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = streams(sent, end="cut")
        data = (await post(running, "/v1/messages", stream=True)).content
        assert data.startswith(sent + b"event: error\ndata: ")
        value = json.loads(data.removeprefix(sent + b"event: error\ndata: "))
        assert (value["type"], value["error"]["type"]) == ("error", "api_error")
        assert b"[DONE]" not in data


async def test_an_instance_that_is_cut_after_its_last_event_has_said_all(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in STREAMS:
            a.script = streams(*EVENTS[path], end="cut")
            assert (await post(running, path, stream=True)).content == b"".join(EVENTS[path])


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_within_a_stream_passes_as_it_is_and_counts_as_failed(
    path: str, start_gateway: StartGateway
) -> None:
    failed = b'event: error\ndata: {"type":"error","code":"x","message":"y","param":null,"sequence_number":3}\n\n'
    parts = [*EVENTS[path][:2], failed]
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = streams(*parts)
        assert (await post(running, path, stream=True)).content == b"".join(parts)
        await until(lambda: running.gateway.counters.get("requests", outcome="broken_stream") == 1)
        assert not b.received


async def test_our_own_errors_have_the_shape_of_their_endpoint(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, api_keys=("k",)) as running:
        key = {"authorization": "Bearer k"}
        for path in (*FORWARDS, *UPLOADS):
            for headers, content, status in (({}, b"{}", 401), (JSON | key, b'{"model":"nope"}', 404)):
                if path in UPLOADS and status == 404:
                    response = await running.client.post(
                        path, data={"model": "nope"}, files={"file": b"x"}, headers=key
                    )
                else:
                    response = await running.client.post(path, content=content, headers=headers)
                if path.startswith("/v1/messages"):
                    value = response.json()
                    assert (response.status_code, value["type"]) == (status, "error")
                    kinds = {401: "authentication_error", 404: "not_found_error"}
                    assert value["error"]["type"] == kinds[status]
                else:
                    assert_openai_error(response, status)
        assert not a.received


async def test_bad_bodies_are_a_400_everywhere(start_gateway: StartGateway) -> None:
    bad = [b"", b'{"a":', b"[]", b"null", b"\xff\xfe", b"\x00", b"[" * 100_000, b'{"model":5}']
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in FORWARDS:
            for body in bad:
                response = await running.client.post(path, content=body, headers=JSON)
                assert response.status_code == 400, (path, body[:20])
                assert response.json()["error"]["type"] == "invalid_request_error"
        assert not a.received


async def test_a_loss_before_the_first_byte_is_made_good_elsewhere(start_gateway: StartGateway) -> None:
    answer = b'{"ok":1}'
    dead = whole(json.dumps(error_body("dead", "InternalServerError", 500)).encode(), 500)
    for script in (resets, dead, whole(b"{}", 503), streams(end="cut")):
        async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
            a.script, b.script = script, whole(answer)
            assert (await post(running, "/v1/embeddings")).content == answer
            assert (len(a.received), len(b.received)) == (1, 1)
            assert a.received[0].headers[REQUEST_ID_HEADER] == b.received[0].headers[REQUEST_ID_HEADER]
            assert idle(running, a, b)


async def test_what_nobody_can_do_ends_in_the_last_ones_words(start_gateway: StartGateway) -> None:
    said = b'{"error":{"message":"dead"}}'
    async with instances("a", "b", "c") as fakes, start_gateway(*fakes) as running:
        for fake in fakes:
            fake.script = whole(said, 500)
        response = await post(running, "/v1/messages")
        assert (response.status_code, response.content) == (500, said)
        assert sum(len(fake.received) for fake in fakes) == 2


@pytest.mark.parametrize("fields", [{"background": True}, {"tools": [{"type": "mcp"}]}])
async def test_what_may_have_done_something_is_not_done_twice(
    fields: dict[str, object], start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = resets
        assert_openai_error(await post(running, "/v1/responses", **fields), 502)
        assert not b.received
        a.script, b.script = whole(b"{}", 503), whole(b'{"ok":1}')  # A refusal has done nothing.
        assert (await post(running, "/v1/responses", **fields)).json() == {"ok": 1}


async def test_a_client_that_leaves_ends_its_request_at_the_instance_whatever_it_asked(
    start_gateway: StartGateway,
) -> None:
    """F01: before the reply, and in the middle of a stream."""
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        client = running.client
        askings: list[tuple[Script, Coroutine[Any, Any, httpx.Response]]] = [
            *((silent, post(running, path)) for path in FORWARDS),
            *((silent, client.post(path, data={"model": MODEL}, files={"file": b"x"})) for path in UPLOADS),
            *((silent, client.get(one.path)) for one in ENDPOINTS if one.kind is Kind.LOOK),
            *((streams(EVENTS[path][0], end="wait"), post(running, path, stream=True)) for path in STREAMS),
        ]
        a.freeness_steps = 50_000.0
        await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a")
        for index, (script, asking) in enumerate(askings):
            a.script = script
            task = asyncio.create_task(asking)
            exchange = await a.exchange(index)
            assert not idle(running, a)
            if script is not silent:
                await asyncio.sleep(0.1)  # The stream has begun.
            task.cancel()
            await gone(exchange)
            await until(lambda: idle(running, a))
        assert (len(a.received), len(b.received)) == (len(askings), 0)


async def test_a_reply_that_is_not_json_passes_as_it_comes_and_a_cut_one_is_not_taken_for_whole(
    start_gateway: StartGateway,
) -> None:
    data = bytes(range(256)) * 1000

    async def chunked(exchange: Exchange) -> None:
        await exchange.start(content_type="application/octet-stream")
        await exchange.send(data[:1000], data[1000:])
        await (exchange.finish() if len(exchange.instance.exchanges) == 1 else exchange.cut())

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = chunked
        response = await post(running, "/pooling", encoding_format="bytes")
        assert (response.content, response.headers["content-type"]) == (data, "application/octet-stream")
        with pytest.raises(httpx.RemoteProtocolError):
            await post(running, "/pooling")
        a.script = whole(gzip.compress(data), content_type="text/plain", headers={"content-encoding": "gzip"})
        assert (await post(running, "/pooling")).content == data
        assert idle(running, a)


@pytest.mark.parametrize("path", UPLOADS)
async def test_a_form_goes_to_an_instance_with_its_model_and_is_not_touched(
    path: str, start_gateway: StartGateway
) -> None:
    sound = b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-0\r\n' + bytes(range(256)) * 4000
    async with instances("a", "b") as (a, b):
        b.models = ("whisper",)
        b.script = whole(b"1\n00:00 --> 00:01\nhello\n", content_type="text/plain; charset=utf-8")
        async with start_gateway(a, b) as running:
            fields = {"model": ["other", "whisper"], "language": "\xe9"}
            request = running.client.build_request("POST", path, data=fields, files={"file": ("a.wav", sound)})
            response = await running.client.send(request)
            assert response.text == "1\n00:00 --> 00:01\nhello\n"
            (received,) = b.received
            assert received.body == request.read()
            assert received.headers["content-type"] == request.headers["content-type"]
            assert not a.received
            unknown = await running.client.post(path, data={"model": "other"}, files={"file": b"x"})
            assert_openai_error(unknown, 404)


async def test_what_is_no_form_is_a_400(start_gateway: StartGateway) -> None:
    form = "multipart/form-data; boundary=x"
    part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    bad = [
        ("application/json", b"{}"),
        ("multipart/form-data", part + b"--x--\r\n"),
        (form, b""),
        (form, b"nothing"),
        (form, part),
        (form, part.replace(b' name="model"', b"") + b"--x--\r\n"),
        (form, (part * 1100) + b"--x--\r\n"),
        (form, part.replace(b"\r\nm\r\n", b"\r\n\xff\r\n") + b"--x--\r\n"),
        ("multipart/form-data; boundary=" + "x" * 300, part),
    ]
    async with instances("a") as (a,), start_gateway(a) as running:
        for content_type, body in bad:
            response = await running.client.post(UPLOADS[0], content=body, headers={"content-type": content_type})
            assert_openai_error(response, 400)
        assert not a.received


async def test_other_streams_end_with_done_or_an_error(start_gateway: StartGateway) -> None:
    event = b'data: {"object":"transcription.chunk","choices":[]}\n\n'
    async with instances("a") as (a,), start_gateway(a) as running:
        for end in ("finish", "cut"):
            a.script = streams(event, *([b"data: [DONE]\n\n"] if end == "finish" else []), end=end)
            response = await running.client.post(UPLOADS[0], data={"stream": "true"}, files={"file": b"x"})
            if end == "finish":
                assert response.content == event + b"data: [DONE]\n\n"
            else:
                assert json.loads(response.content.removeprefix(event + b"data: "))["error"]["code"] == 502


PROMPTS: tuple[Any, ...] = ([1, 2, 3, 4], [[1, 2], [3, 4]], ["a", "b"], "", [], None, 5, {}, [1, "a"])


async def test_no_shape_of_an_input_is_the_gateways_to_judge(start_gateway: StartGateway) -> None:
    contents = (None, [{"type": "image_url", "image_url": {"url": "data:x"}}], 5)
    chats = [[{"role": "user", "content": content, "tool_calls": []}] for content in contents]
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = whole(b"{}")
        for path, field, values in (
            ("/v1/completions", "prompt", PROMPTS),
            ("/v1/embeddings", "input", PROMPTS),
            ("/v1/responses", "input", PROMPTS),
            ("/v1/chat/completions", "messages", [*chats, None, [], "x"]),
            ("/v1/messages", "messages", [*chats, None, [], "x"]),
        ):
            for value in values:
                assert (await post(running, path, **{field: value})).status_code == 200
                assert a.received[-1].json[field] == value
            assert (await post(running, path)).status_code == 200


async def test_prompts_of_equal_length_spread(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        for fake in (a, b):
            fake.script, fake.freeness_steps = whole(b"{}"), 8000.0
        async with start_gateway(a, b) as running:
            for path in ("/v1/completions", "/v1/embeddings"):
                a.received.clear()
                b.received.clear()
                prompts = [[index] * 512 for index in range(40)]
                await asyncio.gather(*(post(running, path, prompt=prompt) for prompt in prompts))
                assert len(a.received) + len(b.received) == 40
                assert abs(len(a.received) - len(b.received)) <= 6


async def test_a_body_over_the_limit_is_a_413_everywhere(start_gateway: StartGateway) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async with instances("a") as (a,), start_gateway(a, limits=Limits(body_bytes=1000)) as running:
        for path in ("/v1/embeddings", "/v1/responses", UPLOADS[0]):
            for content in (b" " * 2000, parts()):
                headers = {"content-type": "multipart/form-data; boundary=x"} if path in UPLOADS else JSON
                assert_openai_error(await running.client.post(path, content=content, headers=headers), 413)
        assert not a.received


async def test_what_is_large_within_its_limit_passes_whole(start_gateway: StartGateway) -> None:
    size = 4 * 1024 * 1024
    event = b'event: response.output_text.delta\ndata: {"delta":"' + b"x" * size + b'"}\n\n'
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = streams(event, RESPONSE_EVENTS[-1])
        assert (await post(running, "/v1/responses", stream=True)).content == event + RESPONSE_EVENTS[-1]
        a.script = whole(b'"' + b"y" * size + b'"')
        assert len((await post(running, "/v1/embeddings", input="z" * size)).content) == size + 2
        assert len(a.received[-1].body) > size
        sound = bytes(range(256)) * (size // 256)
        await running.client.post(UPLOADS[0], files={"file": sound})
        assert sound in a.received[-1].body


async def test_the_networks_fault_is_a_502_or_a_504(start_gateway: StartGateway) -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.raw(b"SSH-2.0-no http\r\n\r\n")

    short = Budgets(header_grace_s=0.05, whole_reply_s=0.3, first_byte_s=0.3)
    for script, status, budgets in ((garbage, 502, Budgets()), (resets, 502, Budgets()), (silent, 504, short)):
        async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
            a.script = script
            for stream in (False, True):
                assert_openai_error(await post(running, "/v1/embeddings", stream=stream), status)
            assert idle(running, a)


async def test_an_instance_that_cannot_be_reached_is_passed_over(start_gateway: StartGateway) -> None:
    slow = dataclasses.replace(INTERVALS, probe_s=60, pulse_s=60)
    async with instances("a", "b") as (a, b), start_gateway(a, b, intervals=slow) as running:
        b.script = whole(b'{"ok":1}')
        await a.stop()
        assert (await post(running, "/v1/embeddings")).json() == {"ok": 1}
        assert (await post(running, "/v1/responses", background=True)).json() == {"ok": 1}
        await a.listen(int(httpx.URL(a.url).port or 0))
