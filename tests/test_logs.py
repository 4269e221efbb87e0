"""What is in the log, and what never is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.telemetry import configure_logging, log, logger
from gateway.wire import OWN_REQUEST_ID_HEADER
from tests.conftest import ADMIN_KEY, StartGateway, chat_body, until
from tests.fake_instance import MODEL, Exchange, error_body, instances
from tests.scripts import answers, in_turn, loses_after, starts_and_waits

PROMPT = "CANARY-of-a-prompt"
KEY = "CANARY-of-a-key"
CANARY = "CANARY"


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    root = logging.getLogger()
    before = [(one, list(one.handlers), one.level, one.propagate) for one in (root, logger)]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


def lines(text: str, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


async def test_a_request_is_one_line_when_it_ends(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info", "json")
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = loses_after(3, "cut")
        headers = {"x-request-id": 'mine\t"1"'}
        response = await running.client.post("/v1/chat/completions", json=chat_body(stream=True), headers=headers)
        await running.client.get("/health")
        await until(lambda: running.gateway.counters.get("requests") == 2)
    (line,) = lines(capsys.readouterr().err, "access")
    assert line.pop("duration_ms") >= line.pop("ttft_ms") > 0
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "kvferry",
        "event": "access",
        "request": response.headers[OWN_REQUEST_ID_HEADER],
        "client_id": "mine1",
        "key": "-",
        "method": "POST",
        "route": "/v1/chat/completions",
        "model": MODEL,
        "status": 200,
        "outcome": "2xx",
        "instances": "a>b",
        "moves": 1,
        "tokens": 8,
    }


async def test_a_client_that_leaves_and_an_unknown_path_are_lines_too(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info", "json")
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = starts_and_waits
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)):
            await a.exchange()
        await running.client.get("/v1/x/1234")
        await until(lambda: running.gateway.counters.get("requests") == 2)
    said = lines(capsys.readouterr().err, "access")
    assert {(line["route"], line["model"], line["outcome"]) for line in said} == {
        ("/v1/chat/completions", MODEL, "client_gone"),
        ("other", "other", "4xx"),
    }


async def quotes_the_prompt(exchange: Exchange) -> None:
    await exchange.json(400, error_body(f"bad: {PROMPT}", "BadRequestError", 400))


async def fails_quoting_the_prompt(exchange: Exchange) -> None:
    await exchange.json(500, error_body(f"died of: {PROMPT}", "InternalServerError", 500), {"x-why": PROMPT})


async def sends_no_http(exchange: Exchange) -> None:
    await exchange.raw(PROMPT.encode() + b"\r\n\r\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_neither_prompts_nor_keys_are_in_the_log(
    log_format: str, start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("debug", log_format)
    malformed = answers(f'data: {{"choices":[{{"token_ids":[1,,2],"text":"{PROMPT}"}}]}}\n\n'.encode())
    scripts = [quotes_the_prompt, fails_quoting_the_prompt, sends_no_http, malformed]
    async with instances("a", "b") as (a, b), start_gateway(a, b, api_keys=(KEY,), upstream_api_key=KEY) as running:
        client = running.client
        client.headers["authorization"] = f"Bearer {KEY}"
        for stream in (False, True):
            body = chat_body(stream=stream, messages=[{"role": "user", "content": PROMPT}], user=PROMPT)
            a.script = b.script = loses_after(3, "cut")
            await client.post("/v1/chat/completions", json=body)
            for script in scripts:
                a.script = b.script = script
                await client.post("/v1/chat/completions", json=body)
            await client.post("/v1/completions", json={"model": PROMPT, "prompt": PROMPT})
            await client.post("/v1/completions", json={"vllm_xargs": {f"kvferry_{PROMPT}": 1}})
        a.script = in_turn(starts_and_waits)
        b.script = starts_and_waits
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}):
            await asyncio.sleep(0)
        json_type = {"content-type": "application/json"}
        for content in (f'{{"messages": "{PROMPT}', f'"{PROMPT}"', f'{{"model": ["{PROMPT}"]}}', ""):
            await client.post("/v1/chat/completions", content=content, headers=json_type)
        await client.post(f"/v1/{PROMPT}?key={KEY}")
        await client.get("/v1/models", headers={"authorization": f"Bearer wrong-{KEY}", "x-request-id": "c"})
        await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        await client.get("/admin/requests", headers={"authorization": f"Bearer {KEY}"})
        await client.post("/admin/migrate", json={"request": PROMPT}, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(running.url).port)
        writer.write(f"{PROMPT}\r\n\r\n".encode())
        await reader.read()
        writer.close()
    said = capsys.readouterr().err
    assert "access" in said
    assert "leg_lost" in said
    assert CANARY not in said


def test_json_lines_are_json_whatever_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    log("one", text='a "quote"\nand é \udc80', number=1.5, nothing=None, thing=object)
    logging.getLogger("asyncio").warning("plain %s", "words")
    logging.getLogger("httpx").info("a library's own chatter")
    try:
        raise ValueError("a bug")
    except ValueError:
        logger.exception("failed")
    one, other, bug = map(json.loads, capsys.readouterr().err.splitlines())
    assert (one["event"], one["text"], one["number"]) == ("one", 'a "quote"\nand é \udc80', 1.5)
    assert (other["logger"], other["message"]) == ("asyncio", "plain words")
    assert "ValueError: a bug" in bug["exception"]


def test_a_line_of_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    log("one", text="a\nb", nothing=None)
    assert capsys.readouterr().err.endswith("one text='a\\nb' nothing=-\n")
