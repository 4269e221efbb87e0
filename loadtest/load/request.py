"""The body of one request of a workload."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Any

from loadtest.workloads.workload import Arrival

TOKEN_IDS = (100, 1_000)
"""Within every model's vocabulary, and none of its special ones."""
WORDS = "river stone light water green house small north paper sound table cloud".split()


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    """Prompts of token ids: exactly as long as the workload says, whatever the tokenizer."""
    CHAT = "chat"
    """Prompts of words: about as long."""

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Endpoint.COMPLETIONS else "/v1/chat/completions"


def body(arrival: Arrival, endpoint: Endpoint, model: str, chance: random.Random) -> dict[str, Any]:
    """A stream of exactly as many tokens as the workload says; no two prompts have a beginning in common."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint is Endpoint.COMPLETIONS:
        return {**fields, "prompt": [chance.randrange(*TOKEN_IDS) for _ in range(arrival.prompt_tokens)]}
    text = " ".join(chance.choices(WORDS, k=arrival.prompt_tokens))
    return {**fields, "messages": [{"role": "user", "content": text}]}


def headers(arrival: Arrival, api_key: str) -> dict[str, str]:
    priority = {"x-kvferry-priority": "high"} if arrival.priority > 0 else {}
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"content-type": "application/json", **key, **priority}
