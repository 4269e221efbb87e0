"""What is measured side by side: nothing, kvferry, and what others put before vLLM. Each is a process of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.processes import ManagedProcess, ProcessFailed, free_port

PEERS_VENV = Path(".venv-peers")
HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
ROUTE = "/v1/chat/completions"


class NotInstalled(RuntimeError):
    """A peer is not there: it is left out, and the result says so."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """``process``: ``None`` for the mock itself, asked directly."""

    name: str
    url: str
    process: ManagedProcess | None = None
    version: str = ""
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a proxy is to run."""

    port: int
    mock_url: str
    redis_url: str
    logs: Path


Starter = Callable[[str, Place], Proxy]


def start_kvferry(name: str, place: Place) -> Proxy:
    """``kvferry``, or ``kvferry-N`` with N workers. With a key, as it is used: nothing is switched off."""
    workers = name.partition("-")[2] or "1"
    key = secrets.token_urlsafe(12)
    environment = {
        **os.environ,
        "KVFERRY_SECRET": secrets.token_urlsafe(12),
        "KVFERRY_API_KEYS": key,
        "KVFERRY_REDIS_URL": place.redis_url,
        "KVFERRY_INSTANCES": place.mock_url,
        "KVFERRY_HOST": HOST,
        "KVFERRY_PORT": str(place.port),
        "KVFERRY_SHUTDOWN_ACCEPT_S": "0",
        "KVFERRY_WORKERS": workers,
    }
    command = [sys.executable, "-m", "gateway", "serve"]
    process = ManagedProcess(name, command, log=place.logs / f"{name}.log", environment=environment)
    return Proxy(name, f"http://{HOST}:{place.port}", process, authorization=key)


def start_vllm_router(name: str, place: Place) -> Proxy:
    command = [_peer("vllm-router"), "--worker-urls", place.mock_url, "--policy", "round_robin", "--host", HOST]
    command += ["--port", str(place.port), "--prometheus-port", str(free_port())]
    process = ManagedProcess(name, command, log=place.logs / f"{name}.log")
    return Proxy(name, f"http://{HOST}:{place.port}", process, version=_peer_version("vllm-router"))


LITELLM_CONFIG = """\
model_list:
  - model_name: bench
    litellm_params:
      model: openai/bench
      api_base: {url}/v1
      api_key: none
"""


def start_litellm(name: str, place: Place) -> Proxy:
    config = place.logs / "litellm.yaml"
    config.write_text(LITELLM_CONFIG.format(url=place.mock_url))
    command = [_peer("litellm"), "--config", str(config), "--host", HOST, "--port", str(place.port)]
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    process = ManagedProcess(name, command, log=place.logs / f"{name}.log", environment=environment)
    return Proxy(name, f"http://{HOST}:{place.port}", process, version=_peer_version("litellm"))


STARTERS: dict[str, Starter] = {
    "kvferry": start_kvferry,
    "kvferry-2": start_kvferry,
    "vllm-router": start_vllm_router,
    "litellm": start_litellm,
}


def start_mock(place: Place) -> ManagedProcess:
    command = [sys.executable, "-m", "loadtest.bench.mock_vllm", str(place.port)]
    return ManagedProcess("mock", command, log=place.logs / "mock.log")


async def wait_until_serving(url: str, process: ManagedProcess, authorization: str = "") -> None:
    """Until a whole stream has come through. Raises ProcessFailed."""
    fields = {"model": "bench", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    headers = {"authorization": f"Bearer {authorization}"} if authorization else {}
    answer = "nothing"
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession(trust_env=False) as http:
            while True:
                process.require_running()
                try:
                    async with http.post(url + ROUTE, json=fields | {"user": "0"}, headers=headers) as response:
                        answer = (await response.text())[-500:]
                        if response.status == 200 and "data: [DONE]" in answer:
                            return
                except aiohttp.ClientError as error:
                    answer = repr(error)
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise ProcessFailed(f"{process.name} does not serve; it answered {answer}") from error


def _peer(name: str) -> str:
    path = PEERS_VENV / "bin" / name
    if not path.exists():
        raise NotInstalled(f"{name} is not installed in {PEERS_VENV}: see .cache/setup.log, and `make bench-gateway`")
    return str(path)


def _peer_version(name: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    command: Sequence[str] = [str(PEERS_VENV / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
