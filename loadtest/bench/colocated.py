"""What a move costs the requests that stay: their steps while one is under way, over those while none is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SIDES = ("source", "destination")


@dataclass(frozen=True, slots=True)
class Windows:
    """Steps on one side, in two windows of one run: just before the order to move, and from it to the move.

    ``with_ms`` and ``without_ms`` are gaps as the clients saw them; the others, the engine's own mean over about ten
    steps, once a report. That one does not depend on whether gateway and client get their turn.
    """

    without_ms: list[float]
    with_ms: list[float]
    engine_without_ms: list[float]
    engine_with_ms: list[float]


@dataclass(frozen=True, slots=True)
class ColocatedSample:
    """One live move beside streams that stay, on either side."""

    length: int
    source: Windows
    destination: Windows
    bytes: int
    window_ms: float
    """From the order to the last event of the source."""
    pause_ms: float | None
    """Of the request that moved, to a destination that was busy; ``None`` if its tokens came in bursts."""
    destination_gap_ms: float | None

    def side(self, name: str) -> Windows:
        return self.source if name == "source" else self.destination


def figures(samples: Sequence[ColocatedSample], side: str) -> dict[str, float | None]:
    """Pooled over the samples. ``control_ratio`` compares the two halves of the windows without a move: how far from 1
    such a ratio is by chance. A mean holds where tokens come in bursts and medians say nothing.
    """
    windows = [sample.side(side) for sample in samples]
    without = [gap for window in windows for gap in window.without_ms]
    with_move = [gap for window in windows for gap in window.with_ms]
    first_half = [gap for window in windows for gap in window.without_ms[: len(window.without_ms) // 2]]
    second_half = [gap for window in windows for gap in window.without_ms[len(window.without_ms) // 2 :]]
    return {
        "step_ratio": ratio(statistics.median, with_move, without),
        "control_ratio": ratio(statistics.median, second_half, first_half),
        "mean_step_ratio": ratio(statistics.fmean, with_move, without),
        "engine_step_ratio": ratio(
            statistics.median,
            [step for window in windows for step in window.engine_with_ms],
            [step for window in windows for step in window.engine_without_ms],
        ),
        "step_ms_p50_without": round(statistics.median(without), 3) if without else None,
        "step_ms_p50_with": round(statistics.median(with_move), 3) if with_move else None,
    }


def ratio(
    figure: Callable[[Sequence[float]], float], numerator: Sequence[float], denominator: Sequence[float]
) -> float | None:
    if not numerator or not denominator or figure(denominator) <= 0:
        return None
    return round(figure(numerator) / figure(denominator), 4)


def worst_step_ratio(samples: Sequence[ColocatedSample]) -> float | None:
    """The worse side's."""
    known = [value for side in SIDES if (value := figures(samples, side)["step_ratio"]) is not None]
    return max(known) if known else None
