"""The result of the gateway's benchmark: rows, bars, and the table on the terminal. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench.machine import about_the_run

CPU_FACTOR_MAX = 1.5
"""Of vllm-router's."""
LITELLM_SHARE_MAX = 1 / 20
ADDED_TOKEN_MS_P50_MAX = 0.3
ADDED_TOKEN_MS_P99_MAX = 3.0
ADDED_TTFT_MS_P50_MAX = 2.0
TWO_WORKERS_MIN = 1.7
MEMORY_SETTLED_SHARE = 0.2
"""Of the requests: by then every cache, pool and bounded list has filled up."""
MEMORY_GROWTH_MAX = 0.03


@dataclass(frozen=True, slots=True)
class Mode:
    """``tokens_per_s`` of each stream; 0: as fast as they come."""

    streams: int
    tokens: int
    tokens_per_s: int
    prompt_bytes: int


SMALL, LONG = 100, 256 * 1024
MODES = {
    "paced": Mode(64, 128, 50, SMALL),
    "paced-long": Mode(64, 128, 50, LONG),
    "burst": Mode(64, 256, 0, SMALL),
    "burst-long": Mode(16, 256, 0, LONG),
    "short": Mode(64, 4, 0, SMALL),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement, as the load client made it."""

    round: int
    proxy: str
    mode: str
    figures: dict[str, Any]


Figure = Callable[[dict[str, Any], dict[str, Any]], float | None]
"""Out of a run and the direct run of the same round and mode."""


def _per(name: str, of: str, factor: float = 1.0) -> Figure:
    return lambda run, direct: factor * run[name] / run[of] if run[of] else None


def _added(name: str) -> Figure:
    return lambda run, direct: None if run[name] is None or direct[name] is None else run[name] - direct[name]


FIGURES: dict[str, Figure] = {
    "cpu_ms_per_1000_events": _per("cpu_s", "events", 1e6),
    "cpu_ms_per_request": _per("cpu_s", "requests", 1e3),
    "added_token_ms_p50": _added("token_ms_p50"),
    "added_token_ms_p99": _added("token_ms_p99"),
    "added_ttft_ms_p50": _added("ttft_ms_p50"),
    "requests_per_s": _per("requests", "seconds"),
    "events_per_s": _per("events", "seconds"),
}


def build_result(runs: Sequence[Run], missing: dict[str, str], versions: dict[str, str]) -> dict[str, Any]:
    rows = _rows(runs)
    return {
        "about": about_the_run("loadtest.bench.gateway") | {"peers": versions, "missing": missing},
        "modes": {name: {field: getattr(mode, field) for field in mode.__slots__} for name, mode in MODES.items()},
        "rows": rows,
        "bars": bars(rows),
        "failures": [f"{run.proxy} {run.mode}: {why}" for run in runs for why in run.figures["failures"][:2]],
        "raw": [{"round": run.round, "proxy": run.proxy, "mode": run.mode, **run.figures} for run in runs],
    }


def _rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    direct = {(run.round, run.mode): run.figures for run in runs if run.proxy == "direct"}
    rows = []
    for mode in dict.fromkeys(run.mode for run in runs):
        for proxy in sorted({run.proxy for run in runs}):
            chosen = [run for run in runs if (run.mode, run.proxy) == (mode, proxy)]
            row: dict[str, Any] = {"proxy": proxy, "mode": mode, "rounds": len(chosen)}
            for name, figure in FIGURES.items():
                values = [figure(run.figures, direct[run.round, mode]) for run in chosen]
                known = [value for value in values if value is not None]
                row[name] = round(statistics.median(known), 3) if known else None
                row[f"{name}_spread"] = [round(min(known), 3), round(max(known), 3)] if known else None
            rows.append(row)
    return rows


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``met`` is ``None`` where one of the two figures is not there."""

    def get(proxy: str, mode: str, name: str) -> float | None:
        return next((row[name] for row in rows if (row["proxy"], row["mode"]) == (proxy, mode)), None)

    found = []
    for mode in MODES:
        if mode == "short":
            continue  # It shows what a request costs, not what an event costs.
        ours = get("kvferry", mode, "cpu_ms_per_1000_events")
        for peer, most in (("vllm-router", CPU_FACTOR_MAX), ("litellm", LITELLM_SHARE_MAX)):
            ratio = _ratio(ours, get(peer, mode, "cpu_ms_per_1000_events"))
            name = f"{mode}: CPU per 1,000 events at most {most:g}x {peer}'s"
            found.append(_bar(name, ratio, None if ratio is None else ratio <= most))
    for name, most in (
        ("added_token_ms_p50", ADDED_TOKEN_MS_P50_MAX),
        ("added_token_ms_p99", ADDED_TOKEN_MS_P99_MAX),
        ("added_ttft_ms_p50", ADDED_TTFT_MS_P50_MAX),
    ):
        value = get("kvferry", "paced", name)
        found.append(_bar(f"paced: {name} below {most:g}", value, None if value is None else value < most))
    ratio = _ratio(get("kvferry-2", "short", "requests_per_s"), get("kvferry", "short", "requests_per_s"))
    name = f"two workers serve at least {TWO_WORKERS_MIN:g}x the requests of one (short)"
    found.append(_bar(name, ratio, None if ratio is None else ratio >= TWO_WORKERS_MIN))
    return found


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _bar(name: str, measured: float | None, met: bool | None) -> dict[str, Any]:
    return {"bar": name, "measured": None if measured is None else round(measured, 3), "met": met}


def build_memory(figures: dict[str, Any]) -> dict[str, Any]:
    """The mean of the last fifth against that of the fifth after everything has filled up."""
    samples: list[list[int]] = figures["memory"]
    last = samples[-1][0]
    early = [size for count, size in samples if MEMORY_SETTLED_SHARE <= count / last < 2 * MEMORY_SETTLED_SHARE]
    late = [size for count, size in samples if count / last >= 1 - MEMORY_SETTLED_SHARE]
    growth = statistics.fmean(late) / statistics.fmean(early) - 1 if early and late else None
    bar = f"resident memory grows by at most {MEMORY_GROWTH_MAX:.0%} between a fifth and all of the requests"
    return {
        "about": about_the_run("loadtest.bench.gateway"),
        "requests": last,
        "failures": figures["failures"],
        "bars": [_bar(bar, growth, None if growth is None else growth <= MEMORY_GROWTH_MAX)],
        "samples": [{"requests": count, "resident_bytes": size} for count, size in samples],
    }


COLUMNS = (
    ("cpu_ms_per_1000_events", "CPU ms/1,000 ev", 16),
    ("cpu_ms_per_request", "CPU ms/req", 11),
    ("added_token_ms_p50", "token p50", 11),
    ("added_token_ms_p99", "token p99", 11),
    ("added_ttft_ms_p50", "TTFT p50", 11),
    ("requests_per_s", "req/s", 9),
    ("events_per_s", "events/s", 10),
)


def describe(result: dict[str, Any]) -> str:
    lines = ["", "mode".ljust(12) + "proxy".ljust(12) + "".join(title.rjust(width) for _, title, width in COLUMNS)]
    for row in result["rows"]:
        cells = [("-" if row[name] is None else f"{row[name]:.2f}").rjust(width) for name, _, width in COLUMNS]
        lines.append(row["mode"].ljust(12) + row["proxy"].ljust(12) + "".join(cells))
    return "\n".join([*lines, "", *_describe_bars(result["bars"]), *(f"failed: {why}" for why in result["failures"])])


def describe_memory(result: dict[str, Any]) -> str:
    first, last = result["samples"][0], result["samples"][-1]
    sizes = f"{first['resident_bytes'] / 1e6:.1f} to {last['resident_bytes'] / 1e6:.1f} MB"
    return "\n".join([f"{result['requests']:,} requests: {sizes}", *_describe_bars(result["bars"])])


def _describe_bars(found: Sequence[dict[str, Any]]) -> list[str]:
    words = {True: "met", False: "NOT MET", None: "not measured"}
    return [f"{words[bar['met']]:>12}  {bar['bar']}: {bar['measured']}" for bar in found]
