"""Figures 12 and 16, and what the paper has not tested: which runs each takes."""

from __future__ import annotations

from loadtest.paper.parameters import TOP_RATES_RPS, rate_rps
from loadtest.paper.rows import Job
from loadtest.paper.stalls import SCHEDULERS
from loadtest.paper.variants import COLD_STARTS_S, FAULTS, HEADROOMS_TOKENS, THRESHOLDS_STEPS

COMPARED = ("infaas++", "llumnix", "kvferry")
STRAINED = ("S-S", "L-S")
"""Two traces at load T, on which where a request is makes a difference."""
INTERVALS_S = (0.1, 0.5, 1.0)
RECORDED_RPS = {"azure2023_conv": 8.8, "azure2023_code": 13.0, "sharegpt_10k_lengths": 17.0}
RECORDED_REQUESTS = {"azure2023_conv": 6_000, "azure2023_code": 4_000, "sharegpt_10k_lengths": 6_000}
RECORDED_PARTS = {"azure2023_conv": 3, "azure2023_code": 2}
ALIKE_RPS = 25.0


def figure_12(seeds: int, quick: bool) -> list[Job]:
    """Fragmentation, at a rate of 7.5 as in the paper and at load T, where more waits."""
    rates = (rate_rps("M-M", "T"),) if quick else (7.5, rate_rps("M-M", "T"))
    return [
        Job("12", "M-M", "", rate, 1.0, policy, seed)
        for seed in range(1, seeds + 1)
        for rate in rates
        for policy in ("infaas++", "llumnix", "late-binding", "kvferry")
    ]


def figure_16(seeds: int, quick: bool) -> list[Job]:
    """Requests a second, for each 64 instances: as in the paper, up to what they can serve."""
    return [
        Job("16", "64-64", "", rate * instances / 64, 1.0, policy, seed, instances=instances)
        for seed in range(1, seeds + 1)
        for instances in ((64, 256) if quick else (64, 256, 1024))
        for rate in ((500.0,) if quick else (100.0, 300.0, 500.0))
        for policy in SCHEDULERS
    ]


def three_classes(seeds: int, quick: bool) -> list[Job]:
    """As figure 13, with a class above the high one."""
    return [
        Job("classes", "S-S", "", 26.0, cv, policy, seed, high_priority_share=0.15, highest_priority_share=0.05)
        for seed in range(1, seeds + 1)
        for cv in ((4.0,) if quick else (2.0, 4.0, 8.0))
        for policy in ("llumnix-base", "llumnix", "kvferry-base", "kvferry")
    ]


def majority(seeds: int, quick: bool) -> list[Job]:
    """Most requests have high priority, which then cannot mean much."""
    return [
        Job("majority", "S-S", "", 26.0, 4.0, policy, seed, high_priority_share=0.6)
        for seed in range(1, seeds + 1)
        for policy in ("kvferry-base", "kvferry")
    ]


def headrooms(seeds: int, quick: bool) -> list[Job]:
    return [
        Job("headroom", "S-S", "", 26.0, 4.0, "kvferry", seed, high_priority_share=0.1, variant=variant)
        for seed in range(1, seeds + 1)
        for variant in (f"target load {tokens:,} tokens" for tokens in HEADROOMS_TOKENS)
    ]


def faults(seeds: int, quick: bool) -> list[Job]:
    """Each policy beside itself without the fault."""
    return [
        Job("faults", trace, "T", rate_rps(trace, "T"), 1.0, policy, seed, variant=variant)
        for seed in range(1, seeds + 1)
        for trace in STRAINED
        for policy in COMPARED
        for variant in ("", *FAULTS)
    ]


def intervals(seeds: int, quick: bool) -> list[Job]:
    return [
        Job("intervals", trace, "T", rate_rps(trace, "T"), 1.0, policy, seed, report_interval_s=interval_s)
        for seed in range(1, seeds + 1)
        for trace in (*STRAINED, "M-M")
        for policy in COMPARED
        for interval_s in INTERVALS_S
    ]


def thresholds(seeds: int, quick: bool) -> list[Job]:
    """None is the best everywhere; the paper has set its own by trace."""
    return [
        Job("thresholds", trace, "T", rate_rps(trace, "T"), 1.0, policy, seed, variant=f"threshold {steps} steps")
        for seed in range(1, seeds + 1)
        for trace in (*STRAINED, "M-M")
        for policy in ("llumnix", "kvferry")
        for steps in THRESHOLDS_STEPS
    ]


def recorded(seeds: int, quick: bool) -> list[Job]:
    """The same part of a recorded trace can be run only once; a seed is another part."""
    return [
        Job("recorded", trace, "", rate, 1.0, policy, seed, requests=RECORDED_REQUESTS[trace])
        for trace, rate in RECORDED_RPS.items()
        for seed in range(1, min(seeds, RECORDED_PARTS.get(trace, seeds)) + 1)
        for policy in ("infaas++", "llumnix", "late-binding", "kvferry")
    ]


def alike(seeds: int, quick: bool) -> list[Job]:
    """All requests are alike: what is there left to gain?"""
    return [
        Job("alike", "alike", "", ALIKE_RPS, 1.0, policy, seed)
        for seed in range(1, seeds + 1)
        for policy in ("infaas++", "llumnix", "late-binding", "kvferry")
    ]


def cold_starts(seeds: int, quick: bool) -> list[Job]:
    return [
        Job("cold", "L-L", "", 2.0, 4.0, policy, seed, scale_low_steps=160.0, variant=f"cold start {seconds:g} s")
        for seed in range(1, seeds + 1)
        for policy in ("infaas++", "kvferry")
        for seconds in COLD_STARTS_S
    ]


def together(seeds: int, quick: bool) -> list[Job]:
    """All goals at once: three classes, long tails, bursts, and instances that come and go."""
    return [
        Job(
            "together",
            "L-L",
            "",
            2.0,
            4.0,
            policy,
            seed,
            high_priority_share=0.15,
            highest_priority_share=0.05,
            scale_low_steps=160.0,
        )
        for seed in range(1, seeds + 1)
        for policy in COMPARED
    ]


FIGURES_BEYOND = {
    "12": figure_12,
    "16": figure_16,
    "classes": three_classes,
    "majority": majority,
    "headroom": headrooms,
    "faults": faults,
    "intervals": intervals,
    "thresholds": thresholds,
    "recorded": recorded,
    "alike": alike,
    "cold": cold_starts,
    "together": together,
}
SEEDS_BEYOND = {"16": 1, "faults": 1, "intervals": 2, "thresholds": 1, "recorded": 2, "headroom": 2, "cold": 2}
"""At most; of the others 3."""
assert set(STRAINED) <= set(TOP_RATES_RPS)
