"""The arithmetic of the control plane's benchmark, and its document: rows, bars, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.bench.machine import about_the_run
from loadtest.bench.measures import quantile

Quantiles = dict[str, float | None]
SHARES = {"p50": 0.5, "p99": 0.99}

DECISION_MS_MAX = 1.0
LEADER_TICK_MS_MAX = 20.0
SNAPSHOT_AGE_MS_MAX = 300.0
PACE_SHARE_MIN = 0.95
"""Of the decisions that were asked for: with fewer, the gateway has not kept up."""


def quantiles_ms(values_s: Sequence[float]) -> Quantiles:
    if not values_s:
        return dict.fromkeys((*SHARES, "max"))
    found = {name: round(quantile(values_s, share) * 1000, 4) for name, share in SHARES.items()}
    return {**found, "max": round(max(values_s) * 1000, 4)}


def bucket_quantiles_ms(bounds_s: Sequence[float], counts: Sequence[int]) -> Quantiles:
    """Of a distribution, by its buckets: even within a bucket, as Prometheus has it; above the last bound, that."""
    return {name: _bucket_quantile_ms(bounds_s, counts, share) for name, share in SHARES.items()}


def _bucket_quantile_ms(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    wanted, passed = share * sum(counts), 0
    if not wanted:
        return None
    for low, high, count in zip((0.0, *bounds_s), bounds_s, counts, strict=False):
        if passed + count >= wanted:
            return round((low + (high - low) * (wanted - passed) / count) * 1000, 4)
        passed += count
    return bounds_s[-1] * 1000


def row(instances: int, asked_per_s: float, leader: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``leader`` and ``other``: the figures of two gateways over one window (``deciding_gateway.measure``)."""
    return {
        "instances": instances,
        "reports_per_s": instances * 10,
        "decisions_asked_per_s": asked_per_s,
        "decisions_per_s": round(leader["decisions_per_s"], 1),
        "decision_ms_p50": leader["decision_ms"]["p50"],
        "decision_ms_p99": leader["decision_ms"]["p99"],
        "leader_tick_ms_p50": leader["leader_work_ms"]["p50"],
        "leader_tick_ms_p99": leader["leader_work_ms"]["p99"],
        "leader_round_ms_p99": leader["leader_tick_ms"]["p99"],
        "snapshot_age_ms_p99": max(leader["age_ms"]["p99"], other["age_ms"]["p99"]),
        "loop_lag_ms_p99": leader["loop_lag_ms"]["p99"],
        "cpu_cores": round(leader["cpu_cores"], 2),
        "other_cpu_cores": round(other["cpu_cores"], 2),
    }


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At the largest number of instances, at every speed; ``met`` is ``None`` where nothing was measured."""
    most = max((entry["instances"] for entry in rows), default=0)
    largest = [entry for entry in rows if entry["instances"] == most]
    asked = (
        (f"decision p99 under {DECISION_MS_MAX:g} ms", "decision_ms_p99", DECISION_MS_MAX),
        (f"leader tick p99 under {LEADER_TICK_MS_MAX:g} ms", "leader_tick_ms_p99", LEADER_TICK_MS_MAX),
        (f"snapshot age p99 under {SNAPSHOT_AGE_MS_MAX:g} ms", "snapshot_age_ms_p99", SNAPSHOT_AGE_MS_MAX),
    )
    found = []
    for text, column, limit in asked:
        measured = {f"{entry['decisions_asked_per_s']:g}/s": entry[column] for entry in largest}
        known = [value for value in measured.values() if value is not None]
        met = max(known) < limit if known and len(known) == len(measured) else None
        found.append({"bar": f"{text} at {most} instances", "met": met, "measured": measured})
    paces = {
        f"{entry['decisions_asked_per_s']:g}/s": round(entry["decisions_per_s"] / entry["decisions_asked_per_s"], 3)
        for entry in largest
    }
    kept = min(paces.values()) >= PACE_SHARE_MIN if paces else None
    found.append({"bar": f"as many decisions made as asked for at {most} instances", "met": kept, "measured": paces})
    return found


def build_result(rows: Sequence[dict[str, Any]], windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``windows``: every figure of both gateways."""
    return {
        **about_the_run("loadtest.bench.control", ("kvferry", "uvloop", "httpx", "redis")),
        "about": "Decisions are asked for within the gateway's process, as a request asks for them; no HTTP requests.",
        "rows": list(rows),
        "bars": bars(rows),
        "windows": list(windows),
    }


COLUMNS = (
    ("instances", "instances"),
    ("reports_per_s", "reports/s"),
    ("decisions_per_s", "decisions/s"),
    ("decision_ms_p50", "decision ms"),
    ("decision_ms_p99", "p99"),
    ("leader_tick_ms_p50", "tick ms"),
    ("leader_tick_ms_p99", "p99"),
    ("snapshot_age_ms_p99", "age ms p99"),
    ("loop_lag_ms_p99", "lag ms p99"),
    ("cpu_cores", "cores"),
)


def describe(result: dict[str, Any]) -> str:
    lines = ["", "".join(title.rjust(13) for _, title in COLUMNS)]
    lines += ["".join(_cell(entry[name]).rjust(13) for name, _ in COLUMNS) for entry in result["rows"]]
    words = {True: "met", False: "NOT MET", None: "not measured"}
    lines += ["", *(f"{words[bar['met']]:>12}  {bar['bar']}: {bar['measured']}" for bar in result["bars"])]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if float(value).is_integer() else f"{value:.2f}"
