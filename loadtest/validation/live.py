"""The trace on real servers, as a client sees it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.bench.cluster import Cluster, build_document
from loadtest.bench.measures import NotMeasured, quantile, time_move
from loadtest.profiling.probe import TOKEN_IDS, tokens_in
from loadtest.stack import Stack, StackFailed
from loadtest.workloads.workload import Arrival

MOVES = 6
MOVE_PROMPT_TOKENS, MOVE_TOKENS_BEFORE, MOVE_TOKENS_MAX = 150, 40, 300
SETTLE_TOKENS = 24


@dataclass(slots=True)
class Seen:
    """What became of the requests, in one run."""

    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    moves: int = 0
    failed: int = 0


async def play(stack: Stack, http: aiohttp.ClientSession, arrivals: Sequence[Arrival], seed: int) -> Seen:
    dice = random.Random(seed)
    seen = Seen()
    before = await _counts(stack, http)
    begin_s = time.perf_counter() + 0.5
    async with asyncio.TaskGroup() as tasks:
        for arrival in arrivals:
            prompt = [dice.choice(TOKEN_IDS) for _ in range(arrival.prompt_tokens)]
            tasks.create_task(_request(stack, http, begin_s + arrival.at_s, prompt, arrival.output_tokens, seen))
    after = await _counts(stack, http)
    seen.preemptions, seen.moves = (new - old for new, old in zip(after, before, strict=True))
    return seen


async def _request(
    stack: Stack, http: aiohttp.ClientSession, at_s: float, prompt: list[int], output_tokens: int, seen: Seen
) -> None:
    body = {
        "model": stack.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    await asyncio.sleep(at_s - time.perf_counter())
    sent_s = last_s = time.perf_counter()
    tokens = 0
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with http.post(f"{stack.gateway_url}/v1/completions", json=body, headers=headers) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            event = json.loads(line[6:])
            count = 0 if "error" in event else tokens_in(event)
            if count and not tokens:
                seen.first_token_s.append(now_s - sent_s)
                seen.gaps_s += [0.0] * (count - 1)
            elif count:
                seen.gaps_s += [now_s - last_s, *([0.0] * (count - 1))]
            if count:
                last_s, tokens = now_s, tokens + count
    seen.failed += tokens != output_tokens


async def _counts(stack: Stack, http: aiohttp.ClientSession) -> tuple[int, int]:
    """Preemptions, and migrations that were committed, of all instances since their start."""
    preemptions = 0
    for instance in stack.instances:
        async with http.get(f"{instance.url}/metrics") as response:
            page = await response.text()
        preemptions += sum(
            round(float(value)) for value in re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", page, re.MULTILINE)
        )
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    async with http.get(f"{stack.gateway_url}/admin/instances", headers=headers) as response:
        entries = (await response.json())["instances"]
    moves = 0
    for entry in entries:
        if entry["report"] is None:
            raise StackFailed(f"{entry['id']} does not report")
        moves += ((entry["report"].get("migrations_ended") or {}).get("committed")) or 0
    return preemptions, moves


async def measure_moves(stack: Stack, http: aiohttp.ClientSession) -> dict[str, float]:
    """What a forced move costs: its pause, and at which rate its blocks went, all of its handshake included."""
    cluster = Cluster(stack, http)
    document = build_document(MOVE_PROMPT_TOKENS * MOVES)
    pauses_ms, rates = [], []
    for number in range(MOVES):
        prompt = "".join(document[number * MOVE_PROMPT_TOKENS :][:MOVE_PROMPT_TOKENS])
        try:
            async with cluster.stream(prompt, MOVE_TOKENS_MAX, "a") as stream:
                await stream.wait_for_tokens(MOVE_TOKENS_BEFORE)
                moved = await cluster.move(stream, "b", "live")
                await stream.wait_for_tokens(moved["output_tokens"] + SETTLE_TOKENS)
                pauses_ms.append(max(0.0, time_move(list(stream.arrivals), moved["output_tokens"]).pause_ms))
                rates.append(_rate(moved))
        except NotMeasured:
            continue
    if not pauses_ms:
        raise NotMeasured("no move could be measured")
    return {"downtime_ms": quantile(pauses_ms, 0.5), "copy_bytes_per_s": quantile(rates, 0.5), "moves": len(rates)}


def _rate(moved: dict[str, Any]) -> float:
    return float(moved["bytes_sent"]) / (float(moved["duration_ms"]) / 1000)
