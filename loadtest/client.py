"""A client of the gateway that moves its own requests in mid-stream, and the two instances' own words beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from gateway.wire import SECRET_HEADER
from loadtest.stack import Stack

ATTEMPTS_MAX = 5
TICK_S = 0.02


@dataclass
class Reply:
    """What a client saw of one request, and what became of the moves that it ordered."""

    events: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    request_id: str = ""

    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", [])]

    @property
    def text(self) -> str:
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in self.choices()
        )

    @property
    def reasoning(self) -> str:
        return "".join(choice.get("delta", {}).get("reasoning") or "" for choice in self.choices())

    @property
    def tool_calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each call, put together by index as a client does; ids are random, one a call."""
        calls: dict[int, dict[str, str]] = {}
        for choice in self.choices():
            for part in choice.get("delta", {}).get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"name": "", "arguments": "", "ids": ""})
                call["name"] += part["function"].get("name") or ""
                call["arguments"] += part["function"].get("arguments") or ""
                call["ids"] += "x" if part.get("id") else ""
        assert [call["ids"] for call in calls.values()] == ["x"] * len(calls), "one id a call"
        return [(call["name"], call["arguments"]) for call in calls.values()]

    @property
    def finish(self) -> list[tuple[str, Any]]:
        return [
            (choice["finish_reason"], choice.get("stop_reason")) for choice in self.choices() if choice["finish_reason"]
        ]

    @property
    def roles(self) -> list[str]:
        return [choice["delta"]["role"] for choice in self.choices() if choice.get("delta", {}).get("role")]

    @property
    def usage(self) -> list[dict[str, Any]]:
        return [event["usage"] for event in self.events if event.get("usage")]

    @property
    def fingerprints(self) -> set[Any]:
        return {event.get("system_fingerprint") for event in self.events}

    @property
    def logprobs(self) -> list[Any]:
        """One entry a token, however the tokens were grouped into events."""
        entries: list[Any] = []
        for choice in self.choices():
            logprobs = choice.get("logprobs")
            if not logprobs:
                continue
            if "content" in logprobs:
                entries.extend(logprobs["content"])
            else:
                names = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
                entries.extend(zip(*(logprobs[name] for name in names), strict=True))
        return entries

    def identity(self) -> set[tuple[Any, ...]]:
        """What must be one and the same over the stream."""
        return {tuple(event[name] for name in ("id", "created", "model", "object")) for event in self.events}

    def committed(self) -> list[dict[str, Any]]:
        return [move for move in self.moves if move.get("outcome") == "committed"]

    def outcomes(self) -> list[Any]:
        """For a message: how each ordered move ended."""
        return [(move.get("outcome"), move.get("reason") or move.get("error")) for move in self.moves]


class Client:
    """Requests through the gateway; ``move_at`` orders a move whenever that many tokens have arrived."""

    def __init__(self, stack: Stack, gateway_url: str | None = None) -> None:
        self.stack = stack
        self.url = gateway_url or stack.gateway_url
        # Less than uvicorn's five seconds, so that no request meets a connection that the gateway is just closing.
        self.http = httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(keepalive_expiry=3.0))

    async def close(self) -> None:
        await self.http.aclose()

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.stack.api_key}"}

    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.stack.admin_key}"}

    async def moved(self, path: str, expected: Reply, move_at: Sequence[int] = (40,), **body: Any) -> Reply:
        """A stream that moved as often as asked. On a busy machine the order may come when the stream has ended: then
        it has to equal what was expected all the same, and is tried again."""
        for _ in range(ATTEMPTS_MAX):
            reply = await self.run(path, move_at, **body)
            if len(reply.committed()) == len(move_at):
                return reply
            assert (reply.tokens, reply.text) == (expected.tokens, expected.text)
        raise AssertionError(f"{ATTEMPTS_MAX} streams, and none moved in time: {reply.outcomes()}")

    async def moved_after_events(self, path: str, expected: Reply, events: int, **body: Any) -> Reply:
        """As ``moved``, for streams that show no token ids."""
        for _ in range(ATTEMPTS_MAX):
            reply = await self.run(path, (events,), count=lambda reply: len(reply.events), **body)
            if reply.committed():
                return reply
            assert reply.text == expected.text
        raise AssertionError(f"{ATTEMPTS_MAX} streams, and none moved in time: {reply.outcomes()}")

    async def refused(self, path: str, move_at: int = 20, **body: Any) -> tuple[Reply, dict[str, Any]]:
        """A stream that was ordered to move while it ran, and the answer to the order."""
        for _ in range(ATTEMPTS_MAX):
            reply = await self.run(path, (move_at,), **body)
            (answer,) = reply.moves
            if answer["status"] != 404:
                return reply, answer
        raise AssertionError(f"{ATTEMPTS_MAX} streams, and each was over before the order: {answer}")

    async def whole(self, path: str, **body: Any) -> dict[str, Any]:
        """A reply in one piece."""
        request = {"model": self.stack.model, **body}
        response = await self.http.post(self.url + path, json=request, headers=self.headers())
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def whole_moved(self, path: str, output_tokens: int = 40, **body: Any) -> dict[str, Any]:
        """The same, of a request that moved once it had so many output tokens. It must be the only one under way."""
        for _ in range(ATTEMPTS_MAX):
            running = asyncio.create_task(self.whole(path, **body))
            request_id = await self._running_request(running, output_tokens)
            move = await self.move(request_id) if request_id is not None else None
            answer = await running
            if move is not None and move.get("outcome") == "committed":
                return answer
        raise AssertionError(f"{ATTEMPTS_MAX} replies, and none moved in time: {move}")

    async def _running_request(self, running: asyncio.Task[Any], output_tokens: int) -> str | None:
        while not running.done():
            for instance in self.stack.instances:
                for request in (await self.status(instance.id))["requests"]:
                    if request["output_tokens"] >= output_tokens:
                        return str(request["request_id"])
            await asyncio.sleep(0.01)
        return None

    @contextlib.asynccontextmanager
    async def stream(self, path: str, start_on: str | None = None, **body: Any) -> AsyncIterator[httpx.Response]:
        """A stream whose head is here; it runs on ``start_on`` if that is given."""
        request = {"model": self.stack.model, "stream": True, "return_token_ids": True, **body}
        async with contextlib.AsyncExitStack() as stack:
            async with self.only(start_on) if start_on is not None else contextlib.nullcontext():
                response = await stack.enter_async_context(
                    self.http.stream("POST", self.url + path, json=request, headers=self.headers())
                )
            assert response.status_code == 200, await response.aread()
            yield response

    async def run(
        self,
        path: str,
        move_at: Sequence[int] = (),
        start_on: str | None = None,
        count: Callable[[Reply], int] = lambda reply: len(reply.tokens),
        **body: Any,
    ) -> Reply:
        """A whole stream. Moves alternate between the two instances, beginning away from where it runs."""
        reply = Reply()
        ordered = list(move_at)
        moving: asyncio.Task[dict[str, Any]] | None = None
        async with self.stream(path, start_on, **body) as response:
            reply.request_id = response.headers["x-request-id"]
            async for _ in events(response, reply):
                if moving is not None and moving.done():
                    reply.moves.append(moving.result())
                    moving = None
                if ordered and moving is None and count(reply) >= ordered[0]:
                    ordered.pop(0)
                    moving = asyncio.create_task(self.move(reply.request_id))
        if moving is not None:
            reply.moves.append(await moving)
        return reply

    async def move(self, request_id: str, destination: str | None = None) -> dict[str, Any]:
        """Order a move, to where the request is not if ``destination`` is not given; the gateway's answer."""
        if destination is None:
            source = await self.instance_of(request_id)
            if source is None:
                return {"status": 404, "error": "the request has ended"}
            destination = "b" if source == "a" else "a"
        response = await self.http.post(
            f"{self.url}/admin/migrate",
            json={"request": request_id, "destination": destination},
            headers=self.admin_headers(),
        )
        answer: dict[str, Any] = response.json()
        return {**answer, "status": response.status_code}

    async def instance_of(self, request_id: str) -> str | None:
        """Where the request runs, by the gateway's word."""
        answer = await self.http.get(f"{self.url}/admin/requests", headers=self.admin_headers())
        return next((entry["instance"] for entry in answer.json()["requests"] if entry["id"] == request_id), None)

    @contextlib.asynccontextmanager
    async def only(self, instance_id: str) -> AsyncIterator[None]:
        """Requests that begin here begin on that instance: all others are draining, and the gateway has heard of it."""
        others = [instance.id for instance in self.stack.instances if instance.id != instance_id]
        try:
            for other in others:
                await self._drain(other, draining=True)
            await self._until_only(instance_id)
            yield
        finally:  # A destination of moves again at once; where requests begin, with its next report.
            for other in others:
                await self._drain(other, draining=False)

    async def undrain(self, instance_id: str) -> None:
        """Inside ``only``: the instance is a destination again."""
        await self._drain(instance_id, draining=False)

    async def _drain(self, instance_id: str, *, draining: bool) -> None:
        url = f"{self.stack.instance(instance_id).url}/llumlet/drain"
        headers = {SECRET_HEADER: self.stack.secret}
        response = await self.http.post(url, json={"draining": draining}, headers=headers)
        assert response.status_code == 200, response.text

    async def _until_only(self, instance_id: str) -> None:
        """Until the gateway sends requests to that instance and to no other.

        It may have been away, or drained, in whatever came before.
        """
        patience = asyncio.create_task(machine_time(30.0))
        try:
            while True:
                entries = (await self.http.get(f"{self.url}/admin/instances", headers=self.admin_headers())).json()
                takes = {entry["id"] for entry in entries["instances"] if entry["healthy"] and not entry["draining"]}
                if takes == {instance_id}:
                    return
                assert not patience.done(), f"requests begin on {sorted(takes)}, and not on {instance_id} alone"
                await asyncio.sleep(TICK_S)
        finally:
            patience.cancel()

    async def status(self, instance_id: str) -> dict[str, Any]:
        url = self.stack.instance(instance_id).url
        response = await self.http.get(f"{url}/llumlet/status", headers={SECRET_HEADER: self.stack.secret})
        assert response.status_code == 200, response.text
        status: dict[str, Any] = response.json()
        return status

    async def arrival(self, request_id: str) -> dict[str, Any]:
        """What the last resume of the request cost at its destination."""
        for instance in self.stack.instances:
            for arrival in reversed((await self.status(instance.id))["arrivals"]):
                if arrival["request_id"] == request_id:
                    return dict(arrival)
        raise AssertionError(f"request {request_id} has arrived nowhere")

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Both instances hold nothing: no request, no reservation, every block free. Fails after ``timeout_s``."""
        left: dict[str, Any] = {}
        looking, patience = (asyncio.create_task(wait) for wait in (self._until_empty(left), machine_time(timeout_s)))
        try:
            await asyncio.wait([looking, patience], return_when=asyncio.FIRST_COMPLETED)
            assert looking.done(), f"after {timeout_s} s there is still {left}"
            looking.result()
        finally:
            looking.cancel()
            patience.cancel()

    async def _until_empty(self, left: dict[str, Any]) -> None:
        while True:
            for instance in self.stack.instances:
                left[instance.id] = await self._left(instance.id)
            if not any(left.values()):
                return
            await asyncio.sleep(0.02)

    async def _left(self, instance_id: str) -> dict[str, Any]:
        status = await self.status(instance_id)
        report = status["report"]
        counts = {
            "requests": status["requests"],
            "blocks": report["blocks_total"] - report["blocks_free"],
            "reserved": report["blocks_reserved"],
            "migrations": report["migrations_in"] + report["migrations_out"],
        }
        return {name: value for name, value in counts.items() if value}


async def machine_time(seconds: float) -> None:
    """Wait so long, not counting the time for which the whole machine stood still, as small virtual ones do."""
    for _ in range(round(seconds / TICK_S)):
        await asyncio.sleep(TICK_S)


async def events(response: httpx.Response, reply: Reply) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream; counts ``[DONE]`` and fails on anything that is not an event."""
    async for line in response.aiter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            reply.done += 1
            continue
        event = json.loads(data)
        reply.events.append(event)
        for choice in event.get("choices", []):
            reply.tokens.extend(choice.get("token_ids") or [])
        yield event
