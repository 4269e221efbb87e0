"""The trace: short enough for a test model on two cores, and so dense that memory is what is lacking."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from loadtest.sim.engine import EngineSettings
from loadtest.sim.profile import Profile
from loadtest.workloads.workload import Arrival

INSTANCES = 2
ENGINE = EngineSettings(
    block_size=32, blocks_total=64, batch_max=16, step_tokens_max=1024, sequence_tokens_max=1024, prefix_caching=True
)
"""With few blocks, so that requests wait, are preempted and move."""
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 400), (16, 400)
MEAN_TOKENS = 140.0
GAPS_CV = 2.0
LOAD = 0.7
"""Of what full memories could serve."""


def arrivals(seed: int, count: int, rate_rps: float) -> list[Arrival]:
    """The same lengths and pattern at any rate."""
    dice = random.Random(f"validation {seed}")
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += dice.gammavariate(1 / GAPS_CV**2, GAPS_CV**2) / rate_rps
        found.append(Arrival(at_s, _length(dice, PROMPT_TOKENS), _length(dice, OUTPUT_TOKENS)))
    return found


def _length(dice: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return min(high, low + int(dice.expovariate(1 / MEAN_TOKENS)))


def rate_for(profile: Profile, lengths: Sequence[Arrival]) -> float:
    """Requests a second that keep ``LOAD`` of the instances' memories in use, by how long a request holds its part."""
    prompt, output = (
        statistics.fmean(one.prompt_tokens for one in lengths),
        statistics.fmean(one.output_tokens for one in lengths),
    )
    held_tokens = statistics.fmean(one.prompt_tokens + one.output_tokens / 2 for one in lengths)
    memory_tokens = ENGINE.blocks_total * ENGINE.block_size
    batch = min(ENGINE.batch_max, memory_tokens / held_tokens)
    decode_ms = profile.step_ms([], round(batch), round(batch * held_tokens))
    request_ms = output * decode_ms + batch * profile.step_ms([(0, round(prompt))], 0, 0)
    return LOAD * INSTANCES * batch / (request_ms / 1000)
