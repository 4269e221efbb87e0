"""A whole kvferry on one machine: Redis, real vLLM servers on the CPU with the plugin, and the gateway.

async with Stack(instances=2) as stack:
    stack.gateway_url, stack.api_key, stack.instances[0].url
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

from gateway.wire import SECRET_HEADER
from loadtest.processes import TERMINATE_TIMEOUT_S, ManagedProcess, end_all, free_port
from loadtest.progress import Progress
from loadtest.redis_server import RedisServer
from loadtest.test_model import MODEL_DIRECTORY, MODEL_NAME

LOG_DIRECTORY = Path(".cache/logs")
HOST = "127.0.0.1"
BLOCK_SIZE = 32
MAX_MODEL_LENGTH = 8192
INSTANCE_TIMEOUT_S = 600.0
GATEWAY_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
VLLM_COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
"""`vllm serve` asks for a distribution named vllm, which the CPU build is not."""

PHASES = (
    ("Application startup complete", "ready"),
    ("Available routes are", "opening its routes"),
    ("GPU KV cache size", "warming up"),
    ("CPU KV cache size", "warming up"),
    ("Loading weights took", "making room for the KV cache"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting the engine"),
)
"""What a vLLM server is doing, by the last of these that its log holds; before the first: importing vLLM."""


class StackFailed(RuntimeError):
    """The stack could not be brought up. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One running vLLM server."""

    id: str
    url: str
    process: ManagedProcess

    @property
    def pid(self) -> int:
        """The API server's process, and the id of the process group that holds its engine as well."""
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.process.log


class Stack:
    """Brings everything up in ``async with`` and ends it again, whatever happens in between.

    ``vllm_arguments`` and ``vllm_environment`` are added to every server's; ``gateway_environment`` to the gateway's.
    ``instance_arguments``, by id, are one server's own: it may then serve another model, and is not warmed up.
    ``policy`` is the leader's: ``none`` moves nothing by itself, so that a move happens only where one is forced.
    Keys and secrets are new for each stack.
    """

    def __init__(
        self,
        *,
        instances: int = 2,
        gateway: bool = True,
        policy: str = "none",
        plugin: bool = True,
        vllm_command: Sequence[str] = VLLM_COMMAND,
        model_directory: Path = MODEL_DIRECTORY,
        vllm_arguments: Sequence[str] = (),
        vllm_environment: Mapping[str, str] | None = None,
        instance_arguments: Mapping[str, Sequence[str]] | None = None,
        gateway_environment: Mapping[str, str] | None = None,
        gateway_port: int | None = None,
        log_directory: Path | None = None,
        progress: Progress | None = None,
        start_timeout_s: float = INSTANCE_TIMEOUT_S,
        terminate_timeout_s: float = TERMINATE_TIMEOUT_S,
    ):
        self.secret = secrets.token_urlsafe(24)
        self.admin_key = f"kvferry-admin-{secrets.token_urlsafe(12)}"
        self.api_key = f"kvferry-{secrets.token_urlsafe(12)}"
        self.model = MODEL_NAME
        self.instances: list[Instance] = []
        self.gateway: ManagedProcess | None = None
        self.gateway_url = ""
        self.redis_url = ""
        self.log_directory = log_directory or LOG_DIRECTORY / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._instances_total = instances
        self._with_gateway = gateway
        self._with_plugin = plugin
        self._policy = policy
        self._model_directory = model_directory.resolve()
        self._vllm_command = list(vllm_command)
        self._vllm_arguments = list(vllm_arguments)
        self._vllm_environment = dict(vllm_environment or {})
        self._instance_arguments = dict(instance_arguments or {})
        self._gateway_environment = dict(gateway_environment or {})
        self._gateway_port = gateway_port
        self._progress = progress or Progress()
        self._start_timeout_s = start_timeout_s
        self._terminate_timeout_s = terminate_timeout_s
        self._resources = ExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process. Synchronous, so that nothing can cancel it; safe to call twice."""
        processes = [instance.process for instance in self.instances]
        if self.gateway is not None:
            processes.append(self.gateway)
        try:
            end_all(processes, self._terminate_timeout_s)
        finally:
            self._resources.close()

    def instance(self, instance_id: str) -> Instance:
        return next(instance for instance in self.instances if instance.id == instance_id)

    async def restart(self, instance_id: str) -> Instance:
        """Start an instance anew: same command, same port, same id. Returns when it is warm.

        One that still runs is killed first. What became of the others is none of its business: they may be dead too.
        If it does not come up, whatever was started of it ends with the stack.
        """
        old = self.instance(instance_id)
        index = self.instances.index(old)
        end_all([old.process], 0.0)
        log_before = old.log.stat().st_size
        new = self.instances[index] = self._start_instance(index, _cores(), urlsplit(old.url).port)
        await self._wait(
            f"restarting vLLM server {instance_id} (log in {new.log})",
            {instance_id: lambda: _phase(new.log, log_before)},
            lambda client: self._are_ready(client, [new]),
            self._start_timeout_s,
            new.process.require_running,
        )
        await self._warm_up([new])
        return new

    async def restart_gateway(self, policy: str) -> None:
        """With another policy, at another port. The instances go on; what the gateway serves is lost."""
        assert self.gateway is not None
        end_all([self.gateway], self._terminate_timeout_s)
        self._policy = policy
        self._start_gateway()
        await self._wait(
            f"starting the gateway with the policy {policy}",
            {},
            self._gateway_ready,
            GATEWAY_TIMEOUT_S,
            self.require_running,
        )

    def require_running(self) -> None:
        """Raise :class:`~loadtest.processes.ProcessFailed` with the end of its log if a process has ended."""
        for instance in self.instances:
            instance.process.require_running()
        if self.gateway is not None:
            self.gateway.require_running()

    async def _start(self) -> None:
        if not (self._model_directory / "config.json").exists():
            raise StackFailed(f"there is no model in {self._model_directory}: make it with `make model`")
        if self._with_gateway:
            self.redis_url = self._resources.enter_context(RedisServer(log=self.log_directory / "redis.log")).url
        for index in range(self._instances_total):
            self.instances.append(self._start_instance(index, _cores(), free_port()))
        await self._wait(
            f"starting {self._instances_total} vLLM servers (usually 40 to 90 s; logs in {self.log_directory})",
            {instance.id: lambda instance=instance: _phase(instance.log) for instance in self.instances},  # type: ignore[misc]
            lambda client: self._are_ready(client, self.instances),
            self._start_timeout_s,
            self.require_running,
        )
        await self._warm_up(self.instances)
        if self._with_gateway:
            self._start_gateway()
            await self._wait("starting the gateway", {}, self._gateway_ready, GATEWAY_TIMEOUT_S, self.require_running)

    def _start_instance(self, index: int, cores: Sequence[int], port: int | None) -> Instance:
        instance_id = chr(ord("a") + index)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One core a server: two servers' threads on the same cores would wait for each other at every step.
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[index % len(cores)]) if cores else "auto",
            "VLLM_PLUGINS": "kvferry,kvferry_endpoints" if self._with_plugin else "",
            "KVFERRY_SECRET": self.secret,
            "KVFERRY_INSTANCE_ID": instance_id,
            **self._vllm_environment,
        }
        # On few cores the servers' busy loops would starve the gateway and the client, which then see tokens in bursts.
        command = [
            *_nice(),
            *self._vllm_command,
            "--model",
            str(self._model_directory),
            "--served-model-name",
            self.model,
        ]
        command += ["--host", HOST, "--port", str(port), "--dtype", "float32"]
        command += ["--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LENGTH)]
        # Compiling takes a minute and a C++ compiler, and gains little on a model this small.
        command += ["--enforce-eager"]
        if self._with_plugin:
            command += ["--scheduler-cls", "vllm_plugin.scheduler.KvferryScheduler"]
            command += ["--worker-extension-cls", "vllm_plugin.worker.WorkerExtension"]
        command += [*self._vllm_arguments, *self._instance_arguments.get(instance_id, ())]
        log = self.log_directory / f"vllm-{instance_id}.log"
        process = ManagedProcess(f"vLLM server {instance_id}", command, log=log, environment=environment)
        return Instance(instance_id, f"http://{HOST}:{port}", process)

    async def _warm_up(self, instances: Sequence[Instance]) -> None:
        """vLLM makes some of its kernels at the first request that needs them, which takes seconds on a CPU."""
        common = {"model": self.model, "max_tokens": 4, "seed": 1, "presence_penalty": 0.1, "repetition_penalty": 1.1}
        message = {"role": "user", "content": "warm up"}
        bodies = {
            "/v1/completions": {**common, "prompt": "warm up", "logprobs": 2, "stream": True},
            "/v1/chat/completions": {
                **common,
                "messages": [message],
                "logprobs": True,
                "top_logprobs": 2,
                "stream": True,
            },
        }
        with self._progress.step("warming up"):
            async with httpx.AsyncClient(timeout=INSTANCE_TIMEOUT_S, trust_env=False) as client:
                for path, body in bodies.items():
                    warmed = [instance for instance in instances if instance.id not in self._instance_arguments]
                    posts = (client.post(instance.url + path, json=body) for instance in warmed)
                    for answer in await asyncio.gather(*posts):
                        if answer.status_code != 200:
                            raise StackFailed(f"a server refused its first request: {answer.text}")

    def _start_gateway(self) -> None:
        port = self._gateway_port or free_port()
        self.gateway_url = f"http://{HOST}:{port}"
        environment = {
            **os.environ,
            "KVFERRY_SECRET": self.secret,
            "KVFERRY_ADMIN_KEY": self.admin_key,
            "KVFERRY_API_KEYS": self.api_key,
            "KVFERRY_REDIS_URL": self.redis_url,
            "KVFERRY_INSTANCES": ",".join(instance.url for instance in self.instances),
            "KVFERRY_HOST": HOST,
            "KVFERRY_PORT": str(port),
            "KVFERRY_POLICY": self._policy,
            "KVFERRY_SHUTDOWN_ACCEPT_S": "0",  # There is no balancer in front.
            **self._gateway_environment,
        }
        self.gateway = ManagedProcess(
            "gateway",
            [sys.executable, "-m", "gateway", "serve"],
            log=self.log_directory / "gateway.log",
            environment=environment,
        )

    async def _wait(
        self,
        what: str,
        details: Mapping[str, Callable[[], str]],
        ready: Callable[[httpx.AsyncClient], Awaitable[bool]],
        timeout_s: float,
        require_running: Callable[[], None],
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with self._progress.step(what) as step:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                while not await ready(client):
                    require_running()
                    if time.monotonic() > deadline:
                        raise StackFailed(f"{what}: not ready after {timeout_s:.0f} s; see {self.log_directory}")
                    step.update("  ".join(f"{name}: {detail()}" for name, detail in details.items()))
                    await asyncio.sleep(POLL_INTERVAL_S)

    async def _are_ready(self, client: httpx.AsyncClient, instances: Sequence[Instance]) -> bool:
        # The llumlet's status says more than /health: that the plugin is in, and shares our secret.
        path = "/llumlet/status" if self._with_plugin else "/health"
        answers = [await _status(client, instance.url + path, {SECRET_HEADER: self.secret}) for instance in instances]
        for instance, answer in zip(instances, answers, strict=True):
            if answer in (401, 404):
                raise StackFailed(f"{instance.url}{path} answered {answer}: is the plugin loaded? see {instance.log}")
        return all(answer == 200 for answer in answers)

    async def _gateway_ready(self, client: httpx.AsyncClient) -> bool:
        if await _status(client, f"{self.gateway_url}/health", {}) != 200:
            return False
        # Ready means that it knows every instance, not only that it listens.
        answer = await client.get(
            f"{self.gateway_url}/admin/instances", headers={"authorization": f"Bearer {self.admin_key}"}
        )
        names = [instance.id if self._with_plugin else instance.url for instance in self.instances]
        return answer.status_code == 200 and all(f'"{name}"' in answer.text for name in names)


def _nice() -> list[str]:
    found = shutil.which("nice")
    return [found, "-n", "10"] if found else []


async def _status(client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> int | None:
    """The reply's status code; ``None`` while nothing answers."""
    try:
        return (await client.get(url, headers=dict(headers))).status_code
    except httpx.TransportError:
        return None


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _phase(log: Path, begins_at: int = 0) -> str:
    text = log.read_bytes()[begins_at:].decode(errors="replace")
    return next((phase for marker, phase in PHASES if marker in text), "importing vLLM")
