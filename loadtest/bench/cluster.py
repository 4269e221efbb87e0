"""Two vLLM servers behind a gateway, as the benchmark needs them: streams with arrival times, moves, prefix caches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.wire import SECRET_HEADER
from loadtest.bench.measures import NotMeasured
from loadtest.stack import Instance, Stack
from loadtest.test_model import WORDS

POLL_INTERVAL_S = 0.02
IDLE_TIMEOUT_S = 60.0
DOCUMENT_SEED = 7


def build_document(words_total: int) -> list[str]:
    """Random words, each of them one token with its leading space."""
    generator = random.Random(DOCUMENT_SEED)
    return [f" {generator.choice(WORDS)}" for _ in range(words_total)]


@dataclass(slots=True)
class Stream:
    """One request under way. A task reads it, so that arrival times do not depend on what else the client does."""

    request_id: str
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    failure: str | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    async def wait_for_tokens(self, tokens: int) -> None:
        """Raises NotMeasured if the stream ends before."""
        while self.tokens < tokens:
            if self.failure is not None:
                raise NotMeasured(f"a stream ended at token {self.tokens}: {self.failure}")
            self._arrived.clear()
            await self._arrived.wait()

    async def read(self, response: aiohttp.ClientResponse) -> None:
        tokens = 0
        try:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    self.failure = str(event["error"])
                    break
                count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                if count:
                    tokens += count
                    self.arrivals.append((now_s, tokens))
                    self._arrived.set()
        except aiohttp.ClientError as error:
            self.failure = repr(error)
        self.failure = self.failure or "it was over"
        self._arrived.set()


@dataclass(slots=True)
class StepReports:
    """One instance's mean step time, as it reports it every 100 ms."""

    reports: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, milliseconds)"""

    def within(self, begin_s: float, end_s: float) -> list[float]:
        return [step_ms for at_s, step_ms in self.reports if begin_s <= at_s <= end_s]

    async def read(self, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            self.reports.append((time.perf_counter(), json.loads(line)["step_ms"]))


class Cluster:
    """A stack of two instances, ``a`` and ``b``, seen by a client that may also give operators' orders."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._http = http

    @contextlib.asynccontextmanager
    async def stream(self, prompt: str, tokens_max: int, instance_id: str) -> AsyncIterator[Stream]:
        """Greedy, and longer than it is needed: leaving the block cancels it."""
        body = {
            "model": self._stack.model,
            "prompt": prompt,
            "max_tokens": tokens_max,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with contextlib.AsyncExitStack() as stack:
            async with self._only(instance_id):
                response = await stack.enter_async_context(
                    self._http.post(
                        f"{self._stack.gateway_url}/v1/completions", json=body, headers=_bearer(self._stack.api_key)
                    )
                )
                if response.status != 200:
                    raise NotMeasured(f"a request was refused: {await response.text()}")
                stream = Stream(response.headers["x-request-id"])
                reading = asyncio.create_task(stream.read(response))  # At once: what waits here arrives as a burst.
            try:
                yield stream
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                response.close()

    @contextlib.asynccontextmanager
    async def step_reports(self, instance_id: str) -> AsyncIterator[StepReports]:
        url = self._stack.instance(instance_id).url
        reports = StepReports()
        async with self._http.get(f"{url}/llumlet/reports", headers=self._secret()) as response:
            response.raise_for_status()
            reading = asyncio.create_task(reports.read(response))
            try:
                yield reports
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def move(self, stream: Stream, destination_id: str, method: str) -> dict[str, Any]:
        """The gateway's answer to a forced migration that was committed; raises NotMeasured for any other."""
        order = {"request": stream.request_id, "destination": destination_id, "method": method}
        async with self._http.post(
            f"{self._stack.gateway_url}/admin/migrate", json=order, headers=_bearer(self._stack.admin_key)
        ) as response:
            answer: dict[str, Any] = await response.json()
        if response.status != 200 or answer.get("outcome") != "committed":
            raise NotMeasured(f"a move was not committed: {answer}")
        return answer

    async def forget(self, instance_id: str) -> None:
        """Empty an instance's prefix cache, which it only does when it is idle."""
        url = self._stack.instance(instance_id).url
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            while True:
                async with self._http.post(f"{url}/reset_prefix_cache") as response:
                    if response.status == 200 and (await response.json())["success"]:
                        return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def prompt_tokens(self, stream: Stream, instance_id: str) -> int:
        """As the instance counts them."""
        for request in (await self._status(self._stack.instance(instance_id)))["requests"]:
            if request["request_id"] == stream.request_id:
                return int(request["prompt_tokens"])
        raise NotMeasured("a request runs elsewhere than it was sent")

    async def computed_tokens(self, stream: Stream, instance_id: str) -> int:
        """What the first step at the destination computed of a request that has arrived there."""
        for arrival in reversed((await self._status(self._stack.instance(instance_id)))["arrivals"]):
            if arrival["request_id"] == stream.request_id:
                return int(arrival["computed_tokens"])
        raise NotMeasured("a request has not arrived where it was moved to")

    @contextlib.asynccontextmanager
    async def _only(self, instance_id: str) -> AsyncIterator[None]:
        """Requests that begin here begin on that instance: the other is draining."""
        others = [instance for instance in self._stack.instances if instance.id != instance_id]
        for instance in others:
            await self._drain(instance, draining=True)
        try:
            await self._wait_until_known({instance.id for instance in others})
            yield
        finally:
            for instance in others:
                await self._drain(instance, draining=False)

    async def _drain(self, instance: Instance, *, draining: bool) -> None:
        async with self._http.post(
            f"{instance.url}/llumlet/drain", json={"draining": draining}, headers=self._secret()
        ) as response:
            response.raise_for_status()

    async def _wait_until_known(self, draining: set[str]) -> None:
        """The gateway learns of it with the next report."""
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            while True:
                async with self._http.get(
                    f"{self._stack.gateway_url}/admin/instances", headers=_bearer(self._stack.admin_key)
                ) as response:
                    entries = (await response.json())["instances"]
                if {entry["id"] for entry in entries if (entry["report"] or {}).get("draining")} == draining:
                    return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _status(self, instance: Instance) -> dict[str, Any]:
        async with self._http.get(f"{instance.url}/llumlet/status", headers=self._secret()) as response:
            response.raise_for_status()
            status: dict[str, Any] = await response.json()
            return status

    def _secret(self) -> dict[str, str]:
        return {SECRET_HEADER: self._stack.secret}


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
