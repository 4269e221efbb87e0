"""Streams from fake servers, each held to what it would be if nothing ever happened to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from gateway.wire import PriorityClass
from loadtest.fake_vllm.form import read_body
from loadtest.sim import tokens
from loadtest.sim.engine import Request
from tests.fake_instance import MODEL

PROMPT_TOKENS = 160
PATIENCE_S = 120.0


class FakeStream:
    """A completion under way, read to its end. ``number`` makes the prompt, of which no block is another's."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        number: int,
        output_tokens: int,
        priority: PriorityClass = PriorityClass.NORMAL,
    ) -> None:
        prompt = [number * PROMPT_TOKENS + position for position in range(PROMPT_TOKENS)]
        self._body = {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "stream": True}
        self._headers = {"x-kvferry-priority": priority.word}
        self.client = client
        self.request_id = ""
        self.tokens = 0
        self._text: list[str] = []
        self._finishes: list[str] = []
        self._ends = 0
        self.reading = asyncio.create_task(self._read(client))

    def __repr__(self) -> str:
        return f"<FakeStream {self.request_id} of {self.tokens} tokens, {self._ends} ends>"

    async def _read(self, client: httpx.AsyncClient) -> None:
        arguments: dict[str, Any] = {"json": self._body, "headers": self._headers, "timeout": PATIENCE_S}
        async with client.stream("POST", "/v1/completions", **arguments) as response:
            assert response.status_code == 200, await response.aread()
            self.request_id = response.headers["x-kvferry-request-id"]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self._ends += 1
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            self.tokens += 1
            self._text.append(choice["text"])
            if choice["finish_reason"] is not None:
                self._finishes.append(choice["finish_reason"])

    async def equals_its_twin(self) -> bool:
        """Once it has ended: every token of it, once, in order, with one finish and one end."""
        await self.reading
        return ("".join(self._text), self._finishes, self._ends) == (self._unmoved(), ["length"], 1)

    def _unmoved(self) -> str:
        asked = read_body(self._body, is_chat=False, models=(MODEL,), sequence_tokens_max=1 << 20)
        twin = Request("twin", asked.prompt, asked.output_tokens_max, seed=asked.seed)
        return "".join(map(tokens.text_of, twin.output_token_ids(0, asked.output_tokens_max)))
