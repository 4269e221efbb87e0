"""The official openai client, and bad input, against the gateway in front of real vLLM servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.wire import RESUME_HEADER, SECRET_HEADER
from loadtest.client import Client
from loadtest.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture
def sync_openai(client: Client, stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.api_key, max_retries=0) as api:
        yield api


@pytest_asyncio.fixture(loop_scope="session")
async def async_openai(client: Client, stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.api_key, max_retries=0) as api:
        yield api


async def test_chat_and_completions_of_the_openai_client(sync_openai: openai.OpenAI, stack: Stack) -> None:
    api = sync_openai
    assert [model.id for model in api.models.list()] == [stack.model]
    chat = api.chat.completions.create(
        model=stack.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
    )
    assert chat.choices[0].message.content
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 12
    with api.chat.completions.create(
        model=stack.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == chat.choices[0].message.content
    completion = api.completions.create(model=stack.model, prompt="Hello", max_tokens=12, temperature=0)
    streamed = api.completions.create(model=stack.model, prompt="Hello", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == completion.choices[0].text


async def test_a_move_under_the_async_openai_client(
    async_openai: openai.AsyncOpenAI, client: Client, stack: Stack
) -> None:
    arguments: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Across the water"}],
        "max_tokens": 400,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }

    async def run(move: bool) -> tuple[str, Any]:
        text, usage, moved = "", None, None
        stream = await async_openai.chat.completions.create(**arguments, stream=True)
        count = 0
        async for chunk in stream:
            usage = chunk.usage or usage
            count += 1
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if move and moved is None and count > 30:
                moved = await client.move(chunk.id.removeprefix("chatcmpl-"))
        assert not move or (moved is not None and moved["outcome"] == "committed"), moved
        return text, usage

    assert await run(move=True) == await run(move=False)


async def test_errors_reach_the_openai_client_as_what_they_are(sync_openai: openai.OpenAI, stack: Stack) -> None:
    api = sync_openai
    messages: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        api.chat.completions.create(model="no-such-model", messages=messages)
    with pytest.raises(openai.BadRequestError):
        api.chat.completions.create(model=stack.model, messages=messages, max_tokens=-1)
    extra = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.169.254"}}
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        api.chat.completions.create(model=stack.model, messages=messages, extra_body=extra)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=api.base_url, api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"model":', 400), (b"[]", 400), (b"null", 400), (b"", 400), (b'{"model": "x", "prompt": "y"}', 404)],
)
async def test_a_bad_body_gets_an_error_in_the_openai_shape(client: Client, body: bytes, status: int) -> None:
    headers = {**client.headers(), "content-type": "application/json"}
    response = await client.http.post(f"{client.url}/v1/completions", content=body, headers=headers)
    assert response.status_code == status
    assert {"message", "type", "param", "code"} == response.json()["error"].keys()


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"request": "nobody", "destination": "b"}, 404),
        ({"request": "nobody", "destination": "nowhere"}, 404),
        ({"request": "nobody"}, 400),
        ({"request": 5, "destination": "b"}, 400),
        ([], 400),
    ],
)
async def test_a_bad_migrate_order_gets_an_error_in_the_openai_shape(client: Client, order: Any, status: int) -> None:
    headers = {"authorization": f"Bearer {client.stack.admin_key}"}
    response = await client.http.post(f"{client.url}/admin/migrate", json=order, headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    without_key = await client.http.post(f"{client.url}/admin/migrate", json=order)
    assert without_key.status_code == 401
    assert without_key.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "two of me", "n": 2, "temperature": 0.7}, "n > 1"),
        ({"prompt": ["first", "second"]}, "several prompts"),
        ({"prompt": "three of me", "n": 3, "temperature": 0.7, "logprobs": 1}, "n > 1"),
    ],
)
async def test_a_request_that_cannot_move_says_why_and_goes_on(
    client: Client, fields: dict[str, Any], reason: str
) -> None:
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 400, **fields}
    reply, refusal = await client.refused("/v1/completions", **body)
    assert refusal["status"] == 409, refusal
    assert reason in refusal["error"]["message"]
    assert len(reply.finish) == fields.get("n", 2)


async def test_an_unknown_destination_or_the_source_itself_is_refused_and_the_stream_goes_on(client: Client) -> None:
    answers: list[dict[str, Any]] = []

    class Ordering(Client):
        async def move(self, request_id: str, destination: str | None = None) -> dict[str, Any]:
            source = await self.instance_of(request_id)
            answers.append(await super().move(request_id, "nowhere"))
            answers.append(await super().move(request_id, source))
            return answers[-1]

    ordering = Ordering(client.stack)
    try:
        reply = await ordering.run("/v1/completions", move_at=[20], prompt="Stay", ignore_eos=True, max_tokens=400)
    finally:
        await ordering.close()
    assert [answer["status"] for answer in answers] == [404, 400], answers
    assert len(reply.tokens) == 400
    assert reply.done == 1


LLUMLET_ROUTES = [
    ("GET", "/llumlet/status"),
    ("GET", "/llumlet/reports"),
    ("PUT", "/llumlet/pairing"),
    ("DELETE", "/llumlet/pairing"),
    ("POST", "/llumlet/migrate"),
    ("POST", "/llumlet/drain"),
    ("PUT", "/llumlet/resumes/r"),
    ("DELETE", "/llumlet/resumes/r"),
    ("POST", "/llumlet/migrations/m/reserve"),
    ("POST", "/llumlet/migrations/m/stage"),
    ("POST", "/llumlet/migrations/m/commit"),
    ("POST", "/llumlet/migrations/m/abort"),
]


@pytest.mark.parametrize(("method", "path"), LLUMLET_ROUTES)
@pytest.mark.parametrize("secret", [None, "wrong", ""])
async def test_llumlet_routes_need_the_secret(client: Client, method: str, path: str, secret: str | None) -> None:
    headers = {} if secret is None else {SECRET_HEADER: secret}
    response = await client.http.request(method, client.stack.instance("a").url + path, headers=headers, json={})
    assert response.status_code == 401
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/llumlet/pairing", 400),
        ("POST", "/llumlet/migrate", 400),
        ("POST", "/llumlet/drain", 400),
        ("PUT", "/llumlet/resumes/r", 400),
        ("POST", "/llumlet/migrations/m/reserve", 400),
        ("POST", "/llumlet/migrations/m/stage", 400),
        ("POST", "/llumlet/migrations/a%20b/abort", 400),
    ],
)
@pytest.mark.parametrize("body", [b"{}", b"[]", b"{", b'{"draining": 1, "request_id": 5}'])
async def test_a_bad_llumlet_message_is_refused_with_its_fault(
    client: Client, method: str, path: str, status: int, body: bytes
) -> None:
    headers = {SECRET_HEADER: client.stack.secret}
    response = await client.http.request(method, client.stack.instance("a").url + path, headers=headers, content=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


async def test_a_managed_request_with_a_wrong_secret_is_refused_by_the_instance(client: Client) -> None:
    url = f"{client.stack.instance('a').url}/v1/completions"
    body = {"model": client.stack.model, "prompt": "x", "max_tokens": 1}
    for headers in ({SECRET_HEADER: "wrong"}, {RESUME_HEADER: "r"}):
        response = await client.http.post(url, json=body, headers=headers)
        assert response.status_code == 401
    plain = await client.http.post(url, json=body)
    assert plain.status_code == 200, "a request that is not managed is served as ever"


async def test_a_resume_that_nothing_is_known_of_is_gone(client: Client) -> None:
    url = f"{client.stack.instance('a').url}/v1/completions"
    body = {"model": client.stack.model, "prompt": "x", "max_tokens": 1}
    headers = {SECRET_HEADER: client.stack.secret, RESUME_HEADER: "unknown", "x-request-id": "r1"}
    response = await client.http.post(url, json=body, headers=headers)
    assert response.status_code == 410
    assert response.json()["error"]["message"]
