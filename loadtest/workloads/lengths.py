"""Distributions of prompt and output lengths, in tokens (Llumnix, table 1)."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

LENGTH_MAX = 6144
"""The paper's cap for generated lengths, in tokens."""


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """The generator of the paper's artifact: ``k`` in 1 to 2·mean-1 with a weight of ``k**-alpha``, scaled to the mean.

    Many short ones and a long tail, cut at ``LENGTH_MAX``. As there, a drawn list is scaled by its own mean and not by
    the distribution's: so every list asks for nearly as much, where else 10,000 of them differ by 6 % and more.
    """

    mean: int
    alpha: float

    def draw(self, chance: random.Random, count: int) -> list[int]:
        steps = range(1, 2 * self.mean)
        weights = list(itertools.accumulate(math.pow(step, -self.alpha) for step in steps))
        drawn = chance.choices(steps, cum_weights=weights, k=count)
        scale = self.mean * count / max(1, sum(drawn))
        return [min(LENGTH_MAX, math.ceil(step * scale)) for step in drawn]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A length of which only a few quantiles and the mean are known: log-linear between those. The shortest length is
    what makes the mean right, as near as can be; the longest lies as far above P99 as that above P95."""

    mean: float
    known: tuple[tuple[float, int], ...]
    """(share below, tokens), rising in both."""
    longest: int = LENGTH_MAX

    def draw(self, chance: random.Random, count: int) -> list[int]:
        points = self._points()
        return [max(1, round(_between(points, chance.random()))) for _ in range(count)]

    def _points(self) -> list[tuple[float, float]]:
        inner = [(share, math.log(tokens)) for share, tokens in self.known]
        highest = min(math.log(self.longest), 2 * inner[-1][1] - inner[-2][1])
        low, high = 0.0, inner[0][1]
        for _ in range(60):
            middle = (low + high) / 2
            if _mean([(0.0, middle), *inner, (1.0, highest)]) < self.mean:
                low = middle
            else:
                high = middle
        return [(0.0, low), *inner, (1.0, highest)]


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, chance: random.Random, count: int) -> list[int]:
        return [self.tokens] * count


def _between(points: Sequence[tuple[float, float]], share: float) -> float:
    index = min(max(1, bisect.bisect(points, (share, math.inf))), len(points) - 1)
    (low, from_log), (high, to_log) = points[index - 1], points[index]
    return math.exp(from_log + (to_log - from_log) * (share - low) / (high - low))


def _mean(points: Sequence[tuple[float, float]]) -> float:
    """Of a quantile function that is exponential between its points."""
    total = 0.0
    for (low, from_log), (high, to_log) in itertools.pairwise(points):
        rise = to_log - from_log
        total += (high - low) * (math.exp(from_log) if rise < 1e-9 else (math.exp(to_log) - math.exp(from_log)) / rise)
    return total


SHORT = PowerLaw(128, 2.0)
MEDIUM = PowerLaw(256, 1.5)
LONG = PowerLaw(512, 1.15)
ALIKE = Fixed(256)

SHAREGPT_PROMPT = Quantiles(306, ((0.5, 74), (0.8, 348), (0.95, 1484), (0.99, 3388)))
SHAREGPT_OUTPUT = Quantiles(500, ((0.5, 487), (0.8, 781), (0.95, 988), (0.99, 1234)), 2048)
BURSTGPT_PROMPT = Quantiles(830, ((0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549)))
BURSTGPT_OUTPUT = Quantiles(271, ((0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964)))
