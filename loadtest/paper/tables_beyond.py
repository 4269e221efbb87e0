"""Tables of figures 12 and 16, and of what the paper has not tested."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from loadtest.paper.figures_beyond import COMPARED, INTERVALS_S
from loadtest.paper.gains import BASELINE, FLOOR
from loadtest.paper.markdown import Table, markdown, number
from loadtest.paper.rows import Row
from loadtest.paper.variants import VARIANTS

Column = tuple[str, str, float]
"""A title, a metric, and what it is multiplied by."""
PREFILL: tuple[Column, ...] = (("prefill P99 s", "prefill_p99_s", 1.0), ("mean s", "prefill_mean_s", 1.0))
REQUEST: tuple[Column, ...] = (
    ("decode P99 ms a token", "decode_p99_s_per_token", 1000.0),
    ("request P99 s", "request_p99_s", 1.0),
)
CHURN: tuple[Column, ...] = (
    ("moved more than 3 times, %", "moved_over_3_share", 100.0),
    ("undone within 10 s, %", "moves_undone_share", 100.0),
)
BALANCE: tuple[Column, ...] = (
    ("spread of freeness, steps", "freeness_spread_mean_steps", 1.0),
    ("negative while moving, %", "negative_while_moving_share", 100.0),
)
ALL = ("infaas++", "llumnix", "late-binding", "kvferry")


def describe_beyond(rows: Sequence[Row]) -> list[str]:
    by_figure: dict[str, list[Row]] = {}
    for row in rows:
        by_figure.setdefault(row["figure"], []).append(row)
    parts: list[str] = []
    for figure, (title, make) in SECTIONS.items():
        if figure in by_figure:
            parts += [title, make(by_figure[figure])]
    return parts


def _listed(
    rows: Sequence[Row], keys: Sequence[tuple[str, str]], policies: Sequence[str], columns: Sequence[Column]
) -> str:
    """A line for each value of ``keys`` and each policy: the mean over seeds."""
    names = [name for _, name in keys]
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*(row.get(name) for name in names), row["policy"]), []).append(row)
    table: Table = [[*(title for title, _ in keys), "policy", *(title for title, _, _ in columns), "requests", "seeds"]]
    for key in sorted({key[:-1] for key in found}, key=lambda key: [_place(one) for one in key]):
        for policy in policies:
            mine = found.get((*key, policy), [])
            if mine:
                said = [f"{one:,g}" if isinstance(one, (int, float)) else str(one) for one in key]
                values = [number(_mean(mine, name, factor)) for _, name, factor in columns]
                table.append([*said, policy, *values, f"{min(row['requests'] for row in mine):,}", str(len(mine))])
    return markdown(table)


_PLACES = {variant: place for place, variant in enumerate(VARIANTS)}


def _place(value: object) -> tuple[float, str]:
    """Numbers in order, variants as they are listed, then any other words."""
    if isinstance(value, (int, float)):
        return value, ""
    return _PLACES.get(str(value), len(_PLACES)), str(value)


def _figure_12(rows: Sequence[Row]) -> str:
    columns = (
        ("fragmentation, mean % of memory", "fragmentation_mean_share", 100.0),
        ("P99 %", "fragmentation_p99_share", 100.0),
        *PREFILL,
    )
    return _listed(rows, (("rate", "rate"),), ALL, columns)


def _figure_16(rows: Sequence[Row]) -> str:
    table: Table = [
        [
            "instances",
            "requests/s",
            "scheduler",
            "stall mean, ms a step",
            "P99",
            "a step without, ms",
            "until an instance is chosen, P99 ms",
            "threads that decide",
            "the busiest",
        ]
    ]
    for row in sorted(rows, key=lambda row: (row["instances"], row["rate"], row["policy"])):
        table.append(
            [
                f"{row['instances']:,}",
                f"{row['rate']:,g}",
                row["policy"],
                number(row["stall_mean_ms"]),
                number(row["stall_p99_ms"]),
                number(row["step_mean_ms"]),
                number(row["dispatch_p99_ms"]),
                str(row["scheduler_threads"]),
                f"{row['scheduler_busy_share']:.0%}",
            ]
        )
    return markdown(table)


CLASSES: tuple[Column, ...] = (
    ("highest: mean s", "highest_request_mean_s", 1.0),
    ("P99 s", "highest_request_p99_s", 1.0),
    ("high: mean s", "high_request_mean_s", 1.0),
    ("P99 s", "high_request_p99_s", 1.0),
    ("normal: mean s", "normal_request_mean_s", 1.0),
    ("P99 s", "normal_request_p99_s", 1.0),
)
BASES = ("llumnix-base", "llumnix", "kvferry-base", "kvferry")


def _classes(rows: Sequence[Row]) -> str:
    return _listed(rows, (("CV", "cv"),), BASES, CLASSES)


def _two_classes(rows: Sequence[Row]) -> str:
    return _listed(rows, (("CV", "cv"),), BASES, CLASSES[2:])


def _headrooms(rows: Sequence[Row]) -> str:
    return _listed(rows, (("an instance with high priority is filled to", "variant"),), ("kvferry",), CLASSES[2:])


def _faults(rows: Sequence[Row]) -> str:
    """How much longer everybody's prefill gets, and what is left of the gain over INFaaS++ with the same fault."""
    variants = ["", *dict.fromkeys(row["variant"] for row in rows if row["variant"])]
    table: Table = [
        [
            "fault",
            *(f"{policy}: P99 prefill, times as long" for policy in COMPARED),
            *(f"{policy}: times better than INFaaS++" for policy in COMPARED[1:]),
            "requests lost",
            "runs",
        ]
    ]
    for variant in variants:
        mine = [row for row in rows if row["variant"] == variant]
        longer = [
            _ratio(rows, "prefill_p99_s", {"policy": one, "variant": variant}, {"policy": one, "variant": ""})
            for one in COMPARED
        ]
        better = [
            _ratio(rows, "prefill_p99_s", {"policy": BASELINE, "variant": variant}, {"policy": one, "variant": variant})
            for one in COMPARED[1:]
        ]
        lost = sum(row["requests"] - row["requests_finished"] for row in mine)
        table.append([variant or "none", *map(number, longer), *map(number, better), str(lost), str(len(mine))])
    return markdown(table)


def _intervals(rows: Sequence[Row]) -> str:
    """Against INFaaS++ with reports every 100 ms, and against itself as late."""
    table: Table = [
        [
            "reports every",
            "policy",
            "P99 prefill, times better than INFaaS++ at 100 ms",
            "at the same interval",
            "mean prefill, at 100 ms",
            "of the gain at 100 ms, %",
            "runs",
        ]
    ]
    for policy in COMPARED:
        first: float | None = None
        for interval_s in INTERVALS_S:
            it = {"policy": policy, "report_interval_s": interval_s}
            usual = {"policy": BASELINE, "report_interval_s": INTERVALS_S[0]}
            gain = _ratio(rows, "prefill_p99_s", usual, it)
            alike = _ratio(rows, "prefill_p99_s", {"policy": BASELINE, "report_interval_s": interval_s}, it)
            first = gain if first is None else first
            if gain is not None and first is not None:
                count = sum(all(row[name] == value for name, value in it.items()) for row in rows)
                said = [number(gain), number(alike), number(_ratio(rows, "prefill_mean_s", usual, it))]
                left = number(100 * gain / first) if policy != BASELINE else "-"
                table.append([f"{1000 * interval_s:g} ms", policy, *said, left, str(count)])
    return markdown(table)


def _thresholds(rows: Sequence[Row]) -> str:
    columns = (*PREFILL, *REQUEST, ("moves a request", "moves_per_request", 1.0), *CHURN, *BALANCE)
    return _listed(rows, (("trace", "trace"), ("", "variant")), ("llumnix", "kvferry"), columns)


def _recorded(rows: Sequence[Row]) -> str:
    columns = (
        *PREFILL,
        ("P99.9 s", "prefill_p999_s", 1.0),
        ("largest 5 %, mean s", "largest_prefill_mean_s", 1.0),
        *REQUEST,
    )
    return _listed(rows, (("trace", "trace"), ("rate", "rate")), ALL, columns)


def _scaled(rows: Sequence[Row]) -> str:
    columns = (*PREFILL, ("instances", "instances_mean", 1.0), ("instance-hours", "instance_hours", 1.0))
    return _listed(rows, (("", "variant"),), COMPARED, columns)


def _together(rows: Sequence[Row]) -> str:
    columns = (*CLASSES, *PREFILL, ("instances", "instances_mean", 1.0), *CHURN, *BALANCE)
    return _listed(rows, (("CV", "cv"),), COMPARED, columns)


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "12": ("### Fragmentation (Fig. 12): M-M", _figure_12),
    "16": ("### What a step waits for its scheduler (Fig. 16): 64 tokens in, 64 out", _figure_16),
    "classes": ("### Three classes: S-S at 26 requests/s, 5 % highest, 15 % high", _classes),
    "majority": ("### Six tenths of the requests high: S-S at 26 requests/s", _two_classes),
    "headroom": ("### Headroom: S-S at 26 requests/s, a tenth high", _headrooms),
    "faults": ("### Faults: S-S and L-S at load T", _faults),
    "intervals": ("### Reports less often: S-S, L-S and M-M at load T", _intervals),
    "thresholds": ("### Thresholds of migration at load T", _thresholds),
    "recorded": ("### Recorded traces", _recorded),
    "alike": ("### All requests alike: 256 tokens in, 256 out", _recorded),
    "cold": ("### Cold starts: L-L, 2 requests/s, CV 4, band of 160 to 960 steps", _scaled),
    "together": ("### All at once: L-L, 2 requests/s, CV 4, three classes, auto-scaling", _together),
}


def _ratio(rows: Sequence[Row], metric: str, upper: Row, lower: Row) -> float | None:
    """Geometric mean over traces and seeds, of those that have both."""

    def chosen(wanted: Row) -> dict[tuple[str, int], float]:
        mine = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
        return {(row["trace"], row["seed"]): max(row[metric] or 0.0, FLOOR) for row in mine}

    above, below = chosen(upper), chosen(lower)
    logs = [math.log(above[key] / below[key]) for key in above if key in below]
    return math.exp(statistics.fmean(logs)) if logs else None


def _mean(rows: Sequence[Row], metric: str, factor: float) -> float | None:
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return factor * statistics.fmean(values) if values else None
