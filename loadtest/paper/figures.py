"""Which runs each figure takes. The seeds are not those with which anything was tuned (100 and up)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadtest.paper.figures_beyond import FIGURES_BEYOND, SEEDS_BEYOND
from loadtest.paper.parameters import TOP_RATES_RPS, rate_rps
from loadtest.paper.rows import Job

POLICIES = ("infaas++", "llumnix", "late-binding", "kvferry")
QUICK_TRACES = ("S-S", "L-S", "M-M")


def figure_11(load: str, seeds: int, quick: bool) -> list[Job]:
    """Seven traces; round-robin, which is far behind, on two seeds."""
    traces = QUICK_TRACES if quick else tuple(TOP_RATES_RPS)
    return [
        Job("11", trace, load, rate_rps(trace, load), 1.0, policy, seed)
        for seed in range(1, seeds + 1)
        for trace in traces
        for policy in (*POLICIES, *(("round-robin",) if seed <= 2 and not quick else ()))
    ]


def figure_13(seeds: int, quick: bool) -> list[Job]:
    """A tenth of the requests have high priority; each policy beside itself without classes."""
    return [
        Job("13", "S-S", "", 26.0, cv, policy, seed, high_priority_share=0.1)
        for seed in range(1, seeds + 1)
        for cv in ((2.0, 8.0) if quick else (2.0, 4.0, 6.0, 8.0))
        for policy in ("llumnix-base", "llumnix", "kvferry-base", "kvferry")
    ]


def figure_14(seeds: int, quick: bool) -> list[Job]:
    """Auto-scaling between 1 and 16 instances: over rates, and over burstiness."""
    loads = [(rate, 1.0) for rate in ((2.0,) if quick else (2.0, 2.4, 2.8))]
    loads += [(2.0, cv) for cv in ((4.0,) if quick else (2.0, 4.0, 6.0))]
    return [
        Job("14", "L-L", "", rate, cv, policy, seed, scale_low_steps=160.0)
        for seed in range(1, seeds + 1)
        for rate, cv in loads
        for policy in ("infaas++", "llumnix", "kvferry")
    ]


def figure_15(seeds: int, quick: bool) -> list[Job]:
    """What a P99 costs: the same with the band moved up and down."""
    return [
        Job("15", "L-L", "", 2.0, 2.0, policy, seed, scale_low_steps=16.0 * blocks)
        for seed in range(1, seeds + 1)
        for blocks in ((5, 45) if quick else (5, 25, 45, 65, 85))
        for policy in ("infaas++", "llumnix", "kvferry")
    ]


def at_most(most: int, make: Callable[[int, bool], list[Job]]) -> Callable[[int, bool], list[Job]]:
    """So many seeds; with fewer of those that matter less, all of it ends in two hours."""
    return lambda seeds, quick: make(min(seeds, most), quick)


FIGURES: Mapping[str, Callable[[int, bool], list[Job]]] = {
    "11T": lambda seeds, quick: figure_11("T", seeds, quick),
    "11M": lambda seeds, quick: figure_11("M", seeds, quick),
    "11policy": at_most(3, lambda seeds, quick: figure_11("policy.md", seeds, quick)),
    "11paper": at_most(3, lambda seeds, quick: figure_11("paper", seeds, quick)),
    "13": figure_13,
    "14": at_most(3, figure_14),
    "15": at_most(3, figure_15),
    **{name: at_most(SEEDS_BEYOND.get(name, 3), make) for name, make in FIGURES_BEYOND.items()},
}
QUICK_FIGURES = ("11T", "12", "13", "15", "16", "classes")
"""With one seed and three traces: does it run, and does it look as it should."""
