"""Servers without the plugin, of several models: one with a LoRA adapter, one that embeds. Last, as it has both die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from loadtest.client import Client, Reply, events
from loadtest.stack import Stack
from loadtest.test_model import TEST_SHAPE
from tests.vllm.conftest import SHARED_STACK

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ADAPTER, EMBEDDER = "kvferry-adapter", "kvferry-embedder"
RANK = 8
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}


def make_adapter(directory: Path) -> None:
    """A LoRA adapter of random weights, large enough to be heard."""
    import numpy
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(7)
    shape, hidden = TEST_SHAPE, TEST_SHAPE.hidden_size
    outputs = {"q_proj": shape.heads * shape.head_size, "v_proj": shape.kv_heads * shape.head_size}
    weights = {}
    for layer in range(shape.layers):
        for name, size in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = random.normal(0, 0.3, (RANK, hidden)).astype("float32")
            weights[f"{place}.lora_B.weight"] = random.normal(0, 0.3, (size, RANK)).astype("float32")
    save_file(weights, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    described |= {"target_modules": [*outputs], "base_model_name_or_path": "kvferry-test"}
    (directory / "adapter_config.json").write_text(json.dumps(described))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    if (shared := request.session.stash.get(SHARED_STACK, None)) is not None:
        shared.stop()
    adapter = tmp_path_factory.mktemp("adapter")
    make_adapter(adapter)
    lora = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter}"]
    embeds = ["--served-model-name", EMBEDDER, "--runner", "pooling", "--convert", "embed"]
    async with Stack(instances=2, plugin=False, instance_arguments={"a": lora, "b": embeds}) as stack:
        client = Client(stack)
        try:
            yield client
        finally:
            await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def api(plain: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{plain.url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=plain.stack.api_key, max_retries=0, timeout=120) as api:
        yield api


async def instances(client: Client) -> list[dict[str, Any]]:
    page = (await client.http.get(f"{client.url}/admin/instances", headers=client.admin_headers())).json()
    found: list[dict[str, Any]] = page["instances"]
    return found


async def test_a_server_without_the_plugin_is_served_and_shown_as_such(plain: Client, api: openai.AsyncOpenAI) -> None:
    whole = await api.chat.completions.create(model=plain.stack.model, **CHAT)
    assert whole.choices[0].message.content
    reply = await plain.run("/v1/chat/completions", **CHAT)
    assert reply.text == whole.choices[0].message.content
    assert reply.done == 1
    async with asyncio.timeout(30):  # What its metrics say is read now and then.
        while any(one["load"] is None or one["load"]["requests_running"] for one in await instances(plain)):
            await asyncio.sleep(0.1)
    shown = await instances(plain)
    assert len(shown) == 2
    for one in shown:
        assert (one["plugin"], one["report"], one["healthy"]) == (None, None, True)
    page = (await plain.http.get(f"{plain.url}/metrics", headers=plain.admin_headers())).text
    assert page.count("kvferry_instance_plain{") == 2


async def test_each_model_is_asked_of_its_own_server(plain: Client, api: openai.AsyncOpenAI) -> None:
    base = plain.stack.model
    assert [model.id async for model in api.models.list()] == sorted([base, ADAPTER, EMBEDDER])
    texts = [
        (await api.chat.completions.create(model=model, **CHAT)).choices[0].message.content
        for model in (base, ADAPTER, base, ADAPTER)
    ]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    with pytest.raises(openai.NotFoundError):
        await api.chat.completions.create(model="kvferry", **CHAT)


async def test_embeddings_come_from_the_server_that_embeds(plain: Client, api: openai.AsyncOpenAI) -> None:
    texts = ["a ferry", "a bridge", "a ferry"]
    made = await api.embeddings.create(model=EMBEDDER, input=texts)
    first, second, third = (one.embedding for one in made.data)
    assert len(first) == TEST_SHAPE.hidden_size
    assert first == pytest.approx(third, abs=1e-4)
    assert first != pytest.approx(second, abs=1e-2)
    as_numbers = await api.embeddings.create(model=EMBEDDER, input=texts[0], encoding_format="float")
    assert as_numbers.data[0].embedding == pytest.approx(first, abs=1e-4)
    with pytest.raises(openai.APIStatusError) as refused:  # vLLM's own word.
        await api.embeddings.create(model=plain.stack.model, input="x")
    assert refused.value.status_code in (400, 404, 501)


async def test_a_stream_whose_server_dies_ends_in_one_honest_error(plain: Client, api: openai.AsyncOpenAI) -> None:
    """Nobody can go on with it: there is no plugin. The last of all, since it costs the server."""
    reply = Reply()
    body = {**CHAT, "max_tokens": 4000, "ignore_eos": True}
    killed = False
    async with plain.stream("/v1/chat/completions", None, **body) as response:
        async for _ in events(response, reply):
            if not killed and len(reply.events) > 20:
                os.killpg(plain.stack.instance("a").pid, signal.SIGKILL)
                killed = True
    errors = [event["error"] for event in reply.events if "error" in event]
    assert killed
    assert len(errors) == 1
    assert errors[0]["code"] in (502, 503)
    assert reply.done == 0
    assert reply.finish == []
    refused = await refusal(api, plain.stack.model)
    while refused.status_code == 502:  # Nobody has looked since, so it was tried.
        refused = await refusal(api, plain.stack.model)
    assert refused.status_code == 503
    assert int(refused.response.headers["retry-after"]) >= 1
    made = await api.embeddings.create(model=EMBEDDER, input="still there")
    assert len(made.data) == 1


async def refusal(api: openai.AsyncOpenAI, model: str) -> openai.InternalServerError:
    with pytest.raises(openai.InternalServerError) as raised:
        await api.chat.completions.create(model=model, **CHAT)
    return raised.value
