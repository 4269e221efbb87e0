"""What is asked of an instance for its profile, and in which order."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.profiling.fit import DecodePoint, PrefillPoint
from loadtest.profiling.probe import About

ROUND_TRIPS = 15


@dataclass(frozen=True, slots=True)
class Plan:
    prompt_tokens: tuple[int, ...] = (4, 64, 128, 256, 512, 1024, 2048)
    contexts: tuple[int, ...] = (32, 512, 2048)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repeats: int = 5
    steps: int = 64
    """Of a decode's measurement, at least."""

    def shortened(self, about: About) -> Plan:
        """To what the instance takes at all."""
        longest = about.sequence_tokens_max or max(*self.prompt_tokens, *self.contexts) + self.steps
        room = longest - self.steps - 2 * max(self.batches) - 16
        return Plan(
            tuple(one for one in self.prompt_tokens if one < longest),
            tuple(one for one in self.contexts if one <= room),
            self.batches,
            self.repeats,
            self.steps,
        )

    def fits(self, about: About, requests: int, context: int) -> bool:
        """One that is preempted would spoil the point."""
        if about.blocks_total is None or about.block_size is None:
            return True
        tokens = context + self.steps + 2 * requests + 16
        return requests * (tokens // about.block_size + 1) < about.blocks_total


class Source(Protocol):
    """An instance that can be asked: ``Probe``, over HTTP."""

    async def about(self) -> About: ...

    async def round_trip_ms(self, repeats: int) -> float: ...

    async def first_token_ms(self, prompt_tokens: int) -> float: ...

    async def decode(self, requests: int, prompt_tokens: int, steps: int) -> DecodePoint | None: ...


@dataclass(slots=True)
class Measured:
    about: About
    round_trip_ms: float = 0.0
    prefills: list[PrefillPoint] = field(default_factory=list)
    decodes: list[DecodePoint] = field(default_factory=list)


async def measure(source: Source, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Measured:
    """Raises ProbeFailed. The instance must have nothing else to do."""
    about = await source.about()
    plan = plan.shortened(about)
    for _ in range(2):  # What is done for the first time takes longer.
        for tokens in plan.prompt_tokens:
            await source.first_token_ms(tokens)
    found = Measured(about, await source.round_trip_ms(ROUND_TRIPS))
    samples: dict[int, list[float]] = {tokens: [] for tokens in plan.prompt_tokens}
    for number in range(plan.repeats):  # Round by round, so that a slow minute of the machine spoils no single length.
        tell(f"prompts, round {number + 1} of {plan.repeats}")
        for tokens in plan.prompt_tokens:
            samples[tokens].append(await source.first_token_ms(tokens))
    found.prefills = [PrefillPoint(tokens, statistics.median(taken)) for tokens, taken in samples.items()]
    for requests in plan.batches:
        before = len(found.decodes)
        for context in plan.contexts:
            if plan.fits(about, requests, context):
                tell(f"decoding {requests} requests of {context:,} tokens and more")
                await _decode(source, found, requests, context, plan)
        if len(found.decodes) == before:
            break
    return found


async def _decode(source: Source, found: Measured, requests: int, context: int, plan: Plan) -> None:
    for _ in range(max(1, plan.repeats // 2)):
        point = await source.decode(requests, context, plan.steps)
        if point is None:
            return
        found.decodes.append(point)
