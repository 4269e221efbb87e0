"""Several models and LoRA adapters behind one gateway: each request goes to, and stays with, those that have its."""

from __future__ import annotations

import dataclasses

import pytest

from gateway.wire import OWN_REQUEST_ID_HEADER
from tests.conftest import INTERVALS, StartGateway, chat_body, until
from tests.fake_instance import MODEL, FakeInstance, instances
from tests.scripts import loses_after, starts_and_waits
from tests.test_admin import migrate
from tests.test_routes import assert_openai_error

LORA = {"lora1": {"parent": MODEL, "root": "/adapters/lora1"}}


def with_adapter(*fakes: FakeInstance) -> None:
    for fake in fakes:
        fake.models, fake.card_changes = (MODEL, "lora1"), LORA


async def test_an_adapter_is_listed_as_it_is_served_and_gone_when_it_is_unloaded(start_gateway: StartGateway) -> None:
    async with instances("a", "b", "c") as (a, b, c):
        with_adapter(b)
        async with start_gateway(a, b, c, intervals=dataclasses.replace(INTERVALS, probe_timeout_s=1)) as running:
            c.hangs = True  # Which holds up nobody else's models.
            cards = (await running.client.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
                (MODEL, None, MODEL),
                ("lora1", MODEL, "/adapters/lora1"),
            ]
            for path in ("/v1/chat/completions", "/tokenize", "/v1/responses"):
                for _ in range(3):
                    response = await running.client.post(path, json=chat_body(model="lora1"))
                    assert response.status_code == 200
            assert (len(a.received), len(b.received)) == (0, 9)
            b.models = (MODEL,)
            await until(lambda: not running.gateway.members.knows_model("lora1"), 15)
            for path in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
                response = await running.client.post(path, json=chat_body(model="lora1"))
                message = "The model `lora1` does not exist."
                expected = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
                assert response.json() == {"error": expected}
            assert [card["id"] for card in (await running.client.get("/v1/models")).json()["data"]] == [MODEL]


async def test_a_name_that_two_models_share_is_listed_once_and_always_the_same(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        a.card_changes, b.card_changes = {MODEL: {"max_model_len": 1}}, {MODEL: {"max_model_len": 2}}
        async with start_gateway(a, b) as running:
            replies = {(await running.client.get("/v1/models")).content for _ in range(20)}
            assert len(replies) == 1
            assert b'"max_model_len": 1' in replies.pop()


async def test_a_request_of_an_adapter_goes_on_only_where_the_adapter_is(start_gateway: StartGateway) -> None:
    async with instances("a", "b", "c") as (a, b, c):
        with_adapter(a, c)
        b.freeness_steps, c.freeness_steps = 10_000, 600
        async with start_gateway(a, b, c) as running:
            a.script = loses_after(3, "reset")
            data = await running.stream(model="lora1")
            assert data.endswith(b"data: [DONE]\n\n")
            assert (len(b.received), len(c.received)) == (0, 1)


@pytest.mark.parametrize("model", [MODEL, None])
async def test_a_request_never_goes_on_with_another_model_of_its_name_or_of_none(
    model: str | None, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b):
        b.card_changes = {MODEL: {"root": "another"}}
        async with start_gateway(a, b) as running:
            a.script = loses_after(3, "reset")
            data = await running.stream(model=model)
            assert b'"code": 502' in data
            assert not b.received


async def test_an_operator_cannot_move_a_request_to_another_model(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        with_adapter(a)
        a.script = starts_and_waits
        async with start_gateway(a, b) as running:
            body = chat_body(model="lora1", stream=True)
            async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
                order = await migrate(running, response.headers[OWN_REQUEST_ID_HEADER], "b")
                assert assert_openai_error(order, 409)["code"] == "model_not_served"


async def test_nothing_known_yet_is_a_503_for_every_kind_of_request(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,):
        await a.stop()
        async with start_gateway(a) as running:
            for method, path in (("GET", "/v1/models"), ("GET", "/version"), ("POST", "/v1/embeddings")):
                body = None if method == "GET" else {"model": "x"}
                response = await running.client.request(method, path, json=body)
                assert_openai_error(response, 503)
                assert int(response.headers["retry-after"]) > 0
        await a.listen()
