"""The compose project of two gateways and fake vLLM servers, under load while its containers come and go."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.compose.stack import Load, Stack, docker, has_engine, until

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1_500),
]

MODEL = "kvferry-test"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not has_engine():
        pytest.skip("no Docker engine, or no Docker Compose")
    with Stack(tmp_path_factory.mktemp("compose")) as stack:
        yield stack


def test_an_openai_client_streams_through_the_one_port(stack: Stack) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.keys.api, http_client=http)
    messages: Any = [{"role": "user", "content": "Tell me about the river."}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=50, stream=True)
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]


def test_both_gateways_serve_and_neither_shows_its_metrics_to_clients(stack: Stack) -> None:
    served_by = {stream(stack, 5)[0] for _ in range(20)}
    assert len(served_by) == 2
    key = {"authorization": f"Bearer {stack.keys.admin}"}
    assert stack.http.get("/metrics", headers=key).status_code == 404


def test_prometheus_scrapes_every_replica(stack: Stack) -> None:
    def up() -> dict[str, list[str]]:
        asked = httpx.get(f"{stack.prometheus_url}/api/v1/query", params={"query": "up"}, trust_env=False)
        jobs: dict[str, list[str]] = {}
        for series in asked.json()["data"]["result"]:
            jobs.setdefault(series["metric"]["job"], []).append(series["value"][1])
        return jobs

    until(lambda: up() == {"gateway": ["1", "1"], "vllm": ["1"], "prometheus": ["1"]})


def test_no_stream_breaks_while_servers_come_go_drain_and_die(stack: Stack, tmp_path: Path) -> None:
    # Streams of a few seconds: what a gateway that ends has time for.
    load = Load(stack, tmp_path, "--rate", "5", "--workload", "S-S", "--tokens-max", "1200", "--high-share", "0.1")
    (first,) = stack.containers("vllm")
    until(lambda: stack.usable() == {first})
    stack.scale(vllm=3)
    until(lambda: len(stack.usable()) == 3)
    drained = stack.admin("POST", f"/admin/instances/{first}/drain", json={"timeout_s": 120})
    assert drained["empty"]
    stack.admin("DELETE", f"/admin/instances/{first}/drain")
    stack.scale(vllm=1)
    (last,) = stack.containers("vllm")
    until(lambda: stack.usable() == {last})
    stack.scale(vllm=2, gateway=1)
    stack.scale(vllm=2, gateway=2)
    until(lambda: len(stack.usable()) == 2)
    before = stack.lives()[last]
    kill(last)
    until(lambda: stack.lives().get(last, before) != before)  # Its restart policy brings it back, under its name.
    result = load.end()
    assert (result["broken"], result["failures"], result["unfinished"]) == (0, {}, 0)
    assert result["streams"] > 100


def test_only_the_streams_of_a_killed_gateway_break(stack: Stack) -> None:
    stack.scale(vllm=2)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        begun: list[str] = []
        streams = [pool.submit(stream, stack, 1_500, begun) for _ in range(16)]
        until(lambda: len(begun) == 16)
        docker("kill", stack.containers("gateway")[0])
        after = [stream(stack, 5) for _ in range(20)]
        ended = [one.result() for one in streams]
    assert all(whole for _, whole in after)
    (lives,) = {served_by for served_by, _ in after}
    assert {served_by for served_by, whole in ended if not whole} == {served_by for served_by, _ in ended} - {lives}
    assert any(served_by == lives for served_by, _ in ended)
    stack.scale(vllm=2)


def stream(stack: Stack, tokens: int, begun: list[str] | None = None) -> tuple[str, bool]:
    """Which gateway served it, and whether it came whole. ``begun`` grows when its head is here."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {stack.keys.api}"}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, headers=headers, timeout=120) as response:
        assert response.status_code == 200, response.read()
        served_by = response.headers["x-served-by"]
        if begun is not None:
            begun.append(served_by)
        try:
            lines = [line for line in response.iter_lines() if line]
        except httpx.TransportError:
            return served_by, False
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("error" in event for event in events)
    return served_by, lines[-1] == "data: [DONE]" and events[-1]["choices"][0]["finish_reason"] == "length"


def kill(container: str) -> None:
    """The server's own process, by SIGKILL: Docker would not start again what it was told to kill."""
    script = (
        "import json, urllib.request as r\n"
        "body = json.dumps({'die_at_step': 0}).encode()\n"
        "request = r.Request('http://127.0.0.1:8000/fake/faults', body, {'content-type': 'application/json'})\n"
        "try: r.urlopen(request, timeout=10)\n"
        "except OSError: pass\n"
    )
    docker("exec", container, "python", "-c", script, may_fail=True)  # The container takes it along.
