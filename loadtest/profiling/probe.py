"""One instance, asked as a client asks it: how long to the first token, how long from token to token."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.profiling.fit import DecodePoint

TOKEN_IDS = range(300, 1300)
"""Ordinary tokens of every vocabulary that is known of."""
CHUNK_TOKENS = 8
"""Steps that are averaged before the slowest part of them is left out."""
LEFT_OUT_SHARE = 0.1
TIMEOUT_S = 600.0


class ProbeFailed(RuntimeError):
    """The instance cannot be measured; a sentence for the user."""


@dataclass(frozen=True, slots=True)
class About:
    """What an instance says of itself; ``None`` where it does not."""

    model: str
    sequence_tokens_max: int | None
    block_size: int | None
    blocks_total: int | None


Arrivals = list[tuple[float, int]]
"""Times, and the tokens that had come until then."""


class Probe:
    """Every prompt is new, so that no prefix cache shortens it."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, seed: int, key: str | None = None, model: str | None = None
    ) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._dice = random.Random(seed)
        self.model = model

    async def about(self) -> About:
        cards = json.loads(await self._get("/v1/models"))["data"]
        known = {card["id"]: card for card in cards}
        self.model = self.model or next(iter(known), None)
        if self.model is None or self.model not in known:
            raise ProbeFailed(f"{self._url} does not serve {self.model}; it has {', '.join(known) or 'nothing'}.")
        sizes = {}
        try:
            page = await self._get("/metrics")
        except ProbeFailed:  # A gateway in front has metrics of its own, or none for us.
            page = ""
        if (line := re.search(r"^vllm:cache_config_info\{(.*)\}", page, re.MULTILINE)) is not None:
            sizes = {
                name: int(value) for name, value in re.findall(r'(block_size|num_gpu_blocks)="(\d+)"', line.group(1))
            }
        longest = known[self.model].get("max_model_len")
        return About(self.model, longest, sizes.get("block_size"), sizes.get("num_gpu_blocks"))

    async def round_trip_ms(self, repeats: int) -> float:
        """Of a request for which nothing is computed."""
        taken = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            await self._get("/v1/models")
            taken.append(1000 * (time.perf_counter() - began_s))
        return statistics.median(taken)

    async def first_token_ms(self, prompt_tokens: int) -> float:
        began_s = time.perf_counter()
        arrivals = await self._stream(prompt_tokens, 1)
        if not arrivals:
            raise ProbeFailed(f"{self._url} sent no token ids: is it vLLM, 0.10 or newer?")
        return 1000 * (arrivals[0][0] - began_s)

    async def decode(self, requests: int, prompt_tokens: int, steps: int) -> DecodePoint | None:
        """``None`` if they did not all run at the same time for half of the steps: there is no room for so many."""
        output_tokens = steps + 2 * requests + CHUNK_TOKENS  # The first ones are made while others are still computed.
        streams = await asyncio.gather(*(self._stream(prompt_tokens, output_tokens) for _ in range(requests)))
        if not all(streams):
            return None
        begin_s = max(arrivals[0][0] for arrivals in streams)
        end_s = min(arrivals[-1][0] for arrivals in streams)
        inside = [[one for one in arrivals if begin_s <= one[0] <= end_s] for arrivals in streams]
        if any(len(arrivals) < 2 or arrivals[-1][1] - arrivals[0][1] < steps / 2 for arrivals in inside):
            return None
        kv_tokens = sum(prompt_tokens + (arrivals[0][1] + arrivals[-1][1]) / 2 for arrivals in inside)
        return DecodePoint(requests, kv_tokens, statistics.median(map(step_ms, inside)))

    async def _stream(self, prompt_tokens: int, output_tokens: int) -> Arrivals:
        body = {
            "model": self.model,
            "prompt": [self._dice.choice(TOKEN_IDS) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        arrivals: Arrivals = []
        count = 0
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body, headers=self._headers) as response:
                if response.status != 200:
                    raise ProbeFailed(f"{self._url} refused a request: {(await response.text())[:300]}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now_s = time.perf_counter()
                        count += tokens_in(json.loads(line[6:]))
                        if count > (arrivals[-1][1] if arrivals else 0):
                            arrivals.append((now_s, count))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProbeFailed(f"{self._url} cannot be reached: {error!r}") from error
        return arrivals

    async def _get(self, path: str) -> str:
        try:
            async with self._http.get(self._url + path, headers=self._headers) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProbeFailed(f"{self._url} cannot be reached: {error!r}") from error
        if response.status != 200:
            raise ProbeFailed(f"{self._url}{path} answered {response.status}: {text[:200]}")
        return text


def tokens_in(event: dict[str, Any]) -> int:
    if "error" in event:
        raise ProbeFailed(f"a request failed: {event['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))


def step_ms(arrivals: Sequence[tuple[float, int]]) -> float:
    """The mean step, without the slowest tenth, which are the machine's pauses. Tokens may come several at a time."""
    chunks, begun = [], arrivals[0]
    for one in arrivals[1:]:
        if one[1] - begun[1] >= CHUNK_TOKENS:
            chunks.append(1000 * (one[0] - begun[0]) / (one[1] - begun[1]))
            begun = one
    if not chunks:
        return 1000 * (arrivals[-1][0] - arrivals[0][0]) / (arrivals[-1][1] - arrivals[0][1])
    chunks.sort()
    return statistics.fmean(chunks[: max(1, round(len(chunks) * (1 - LEFT_OUT_SHARE)))])
