"""Measured times to a profile's coefficients: least squares in which no coefficient is negative. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sim.profile import Profile

STEP_FLOOR_MS = 0.01
"""Where prompts take no time that could be told from noise, a step must end all the same."""


class NotEnough(ValueError):
    """There are too few points to tell one coefficient from another."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """``ms`` from the request to its first token, on an instance that has nothing else to do."""

    tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """``ms`` a step that gives each of ``requests`` a token. ``kv_tokens``: of all together, in the mean."""

    requests: int
    kv_tokens: float
    ms: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The errors are mean distances of the points from the profile, each as a part of its point."""

    profile: Profile
    prefill_error_share: float
    decode_error_share: float


def fit_profile(
    name: str, prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint], round_trip_ms: float
) -> Fit:
    """Raises NotEnough. ``round_trip_ms``: of a request that makes the instance compute nothing.

    A first token takes a request's way to the engine and back beside its step. The shortest prompt tells that way: its
    step takes no longer than one that decodes a single request, since both only pass the weights once.
    """
    if len({one.tokens for one in prefills}) < 3 or len({(one.requests, one.kv_tokens) for one in decodes}) < 3:
        raise NotEnough("three lengths of prompts, and three loads of decoding requests, are the least")
    base_ms, request_ms, kv_token_ms = least_squares(
        [(1.0, float(one.requests), one.kv_tokens) for one in decodes], [one.ms for one in decodes]
    )
    fixed_ms, token_ms, square_ms = least_squares(
        [(1.0, float(one.tokens), float(one.tokens) ** 2) for one in prefills], [one.ms for one in prefills]
    )
    shortest = min(prefills, key=lambda one: (one.tokens, one.ms))
    single_ms = base_ms + request_ms + kv_token_ms * shortest.tokens
    way_ms = min(fixed_ms, max(round_trip_ms, shortest.ms - single_ms))
    profile = Profile(
        name=name,
        prefill_base_ms=_rounded(fixed_ms - way_ms),
        prefill_token_ms=_rounded(token_ms),
        prefill_square_ms=_rounded(square_ms),
        decode_base_ms=_rounded(base_ms),
        decode_request_ms=_rounded(request_ms),
        decode_kv_token_ms=_rounded(kv_token_ms),
        step_floor_ms=STEP_FLOOR_MS,
        request_ms=_rounded(way_ms),
    )
    return Fit(
        profile,
        statistics.fmean(
            abs(profile.step_ms([(0, one.tokens)], 0, 0) + profile.request_ms - one.ms) / one.ms for one in prefills
        ),
        statistics.fmean(
            abs(profile.step_ms([], one.requests, round(one.kv_tokens)) - one.ms) / one.ms for one in decodes
        ),
    )


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Of relative errors, so that short times count as much as long ones. With few columns all choices of those that
    are not zero can be tried, and the best one is exact."""
    columns = range(len(rows[0]))
    weighted = [[part / value for part in row] for row, value in zip(rows, values, strict=True)]
    scales = [max(abs(row[column]) for row in weighted) or 1.0 for column in columns]
    scaled = [[row[column] / scales[column] for column in columns] for row in weighted]
    best, found = math.inf, [0.0 for _ in columns]
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, size + 1) for size in columns):
        part = _solve([[row[column] for column in chosen] for row in scaled])
        if part is None or min(part) < 0:
            continue
        solution = dict(zip(chosen, part, strict=True))
        error = math.fsum(
            (math.fsum(row[column] * factor for column, factor in solution.items()) - 1.0) ** 2 for row in scaled
        )
        if error < best - 1e-12:
            best, found = error, [solution.get(column, 0.0) / scales[column] for column in columns]
    return found


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The normal equations for a right side of ones, by elimination; ``None`` if they have no single answer."""
    size = len(rows[0])
    matrix = [
        [math.fsum(row[left] * row[right] for row in rows) for right in range(size)]
        + [math.fsum(row[left] for row in rows)]
        for left in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(matrix[index][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for index in range(size):
            if index != column:
                factor = matrix[index][column] / matrix[column][column]
                matrix[index] = [a - factor * b for a, b in zip(matrix[index], matrix[column], strict=True)]
    return [matrix[index][size] / matrix[index][index] for index in range(size)]


def _rounded(value: float) -> float:
    return float(f"{max(0.0, value):.4g}")
