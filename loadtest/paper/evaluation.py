"""Rows to tables, and the tables into docs/evaluation.md, whose other words are not touched."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.paper.gains import BASELINE, Gain, gain, mean_of
from loadtest.paper.markdown import Table, markdown, number
from loadtest.paper.parameters import TOP_RATES_RPS
from loadtest.paper.rows import Row
from loadtest.paper.tables_beyond import describe_beyond

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
METRICS = (
    ("P99 prefill", "prefill_p99_s"),
    ("mean prefill", "prefill_mean_s"),
    ("P99.9", "prefill_p999_s"),
    ("max", "prefill_max_s"),
    ("largest 5 %", "largest_prefill_mean_s"),
    ("P99 decode", "decode_p99_s_per_token"),
    ("preemption loss", "preemption_loss_mean_s"),
    ("request P99", "request_p99_s"),
)
PAPERS_GAINS = {
    "prefill_p99_s": 3.5,
    "prefill_mean_s": 2.4,
    "decode_p99_s_per_token": 1.21,
    "preemption_loss_mean_s": 2.9,
    "request_p99_s": 1.25,
}
"""Geometric means over its seven traces at its highest rates."""
ORDER = ("round-robin", "llumnix", "late-binding", "kvferry")
LOADS = {
    "T": "Load T: INFaaS++'s P99 prefill is the paper's at its highest rates",
    "M": "Load M: 0.96 to 1.10 times the paper's highest rates, before the knee",
    "policy.md": "The factors at which a first simulation had T: 1.00 to 1.25 times the paper's highest rates",
    "paper": "The paper's highest rates",
}
BARS = (
    ("kvferry", "T", "prefill_p99_s", 7.0),
    ("kvferry", "M", "prefill_p99_s", 2.8),
    ("kvferry", "T", "prefill_mean_s", 5.0),
    ("kvferry", "T", "prefill_p999_s", 3.5),
    ("kvferry", "T", "prefill_max_s", 3.5),
    ("kvferry", "T", "largest_prefill_mean_s", 2.5),
    ("kvferry", "T", "decode_p99_s_per_token", 1.2),
    ("kvferry", "T", "preemption_loss_mean_s", 3.0),
    ("kvferry", "T", "request_p99_s", 1.12),
)


def describe(rows: Sequence[Row]) -> str:
    """For people: on the terminal, and in the page."""
    parts = [*_figure_11(rows), *_bars(rows), *_figure_13(rows), *_figures_14_15(rows), *describe_beyond(rows)]
    return "\n\n".join(parts) if parts else "No rows yet."


def write_page(path: Path, rows: Sequence[Row], source: Path, plots: Sequence[Path] = ()) -> None:
    text = path.read_text() if path.exists() else f"# Evaluation\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    note = f"Made by `make paper` from [{source.name}](results/{source.name})."
    seen = "".join(
        f"![{plot.stem.replace('-', ' ').capitalize()}]({plot.parent.name}/{plot.name})\n\n" for plot in plots
    )
    path.write_text(f"{before}{BEGIN}\n{note}\n\n{seen}{describe(rows)}\n{END}{after}")


def _figure_11(rows: Sequence[Row]) -> list[str]:
    parts = []
    for load, title in LOADS.items():
        found = {one: gain(rows, load, one, "prefill_p99_s") for one in ORDER}
        if not any(found.values()):
            continue
        table: Table = [["times better than INFaaS++", *(name for name, _ in METRICS), "seeds"]]
        if load in ("T", "paper"):
            table.append(["the paper's points", *(number(PAPERS_GAINS.get(name)) for _, name in METRICS), ""])
        for policy, first in found.items():
            if first is not None:
                gains = [gain(rows, load, policy, name) for _, name in METRICS]
                table.append([policy, *map(_gain, gains), str(first.seeds)])
        parts += [f"### {title}", markdown(table)]
        parts.append(_by_trace(rows, load))
        parts.append(_by_strain(rows, load))
        parts.append(_churn(rows, load))
    return parts


def _by_trace(rows: Sequence[Row], load: str) -> str:
    traces = [trace for trace in TOP_RATES_RPS if any(row["trace"] == trace for row in rows if row["load"] == load)]
    table: Table = [["P99 prefill, by trace", *traces]]
    baseline = [number(mean_of(rows, "prefill_p99_s", _of(load, BASELINE, trace))) + " s" for trace in traces]
    table.append([f"{BASELINE}, mean of seeds", *baseline])
    for policy in ORDER:
        found = gain(rows, load, policy, "prefill_p99_s")
        if found is not None:
            table.append([f"{policy}, times better", *(number(found.by_trace.get(trace)) for trace in traces)])
    return markdown(table)


def _by_strain(rows: Sequence[Row], load: str) -> str:
    """The seeds' loads differ: where INFaaS++ has no queue there is nothing to gain."""
    found = {
        (row["policy"], row["trace"], row["seed"]): row["prefill_p99_s"]
        for row in rows
        if row["figure"] == "11" and row["load"] == load
    }
    bounds = ((0.0, 5.0), (5.0, 40.0), (40.0, float("inf")))
    table: Table = [["P99 prefill, times better, by INFaaS++'s own", "under 5 s", "5 to 40 s", "over 40 s"]]
    for policy in ORDER:
        cells = []
        for low, high in bounds:
            logs = [
                math.log(found[BASELINE, trace, seed] / value)
                for (name, trace, seed), value in found.items()
                if name == policy and low <= found.get((BASELINE, trace, seed), -1.0) < high
            ]
            cells.append(f"{number(math.exp(statistics.fmean(logs)))} ({len(logs)} runs)" if logs else "-")
        if any(cell != "-" for cell in cells):
            table.append([policy, *cells])
    return markdown(table)


def _churn(rows: Sequence[Row], load: str) -> str:
    columns = (
        ("moves a request", "moves_per_request", 1.0),
        ("moved more than 3 times, %", "moved_over_3_share", 100.0),
        ("undone within 10 s, %", "moves_undone_share", 100.0),
        ("preempted, %", "preempted_share", 100.0),
        ("fragmentation, % of memory", "fragmentation_mean_share", 100.0),
        ("told busy, % of requests", "busy_answers", 0.01),
    )
    table: Table = [["means over all runs", *(title for title, _, _ in columns)]]
    for policy in (BASELINE, *ORDER):
        values = [mean_of(rows, name, _of(load, policy)) for _, name, _ in columns]
        if values[0] is not None:
            cells = [
                number(value * factor if value is not None else None)
                for value, (_, _, factor) in zip(values, columns, strict=True)
            ]
            table.append([policy, *cells])
    return markdown(table)


def _bars(rows: Sequence[Row]) -> list[str]:
    table: Table = [["asked for, times better than INFaaS++", "bar", "measured (95 %)", ""]]
    for policy, load, metric, least in BARS:
        found = gain(rows, load, policy, metric)
        if found is not None:
            title = next(title for title, name in METRICS if name == metric)
            word = "met" if found.mean >= least else "not met"
            table.append([f"{policy} at {load}: {title}", f"{least:g}", _gain(found), word])
    worst = gain(rows, "T", "kvferry", "prefill_p99_s")
    if worst is not None:
        trace = min(worst.by_trace, key=lambda one: worst.by_trace[one])
        word = "met" if worst.by_trace[trace] >= 1.2 else "not met"
        table.append(
            ["kvferry at T: P99 prefill on every trace", "1.2", f"{worst.by_trace[trace]:.2f} ({trace})", word]
        )
    return ["### The bars", markdown(table)] if len(table) > 1 else []


def _figure_13(rows: Sequence[Row]) -> list[str]:
    chosen = [row for row in rows if row["figure"] == "13"]
    if not chosen:
        return []
    table: Table = [
        ["CV", "policy", "high: mean s", "P99 s", "prefill P99 s", "normal: mean s", "P99 s", "requests", "seeds"]
    ]
    names = (
        "high_request_mean_s",
        "high_request_p99_s",
        "high_prefill_p99_s",
        "normal_request_mean_s",
        "normal_request_p99_s",
    )
    for cv in sorted({row["cv"] for row in chosen}):
        for policy in ("llumnix-base", "llumnix", "kvferry-base", "kvferry"):
            mine = [row for row in chosen if row["cv"] == cv and row["policy"] == policy]
            if mine:
                values = [number(mean_of(mine, name, lambda row: True)) for name in names]
                table.append([f"{cv:g}", policy, *values, _requests(mine), str(len(mine))])
    return ["### Priorities (Fig. 13): S-S at 26 requests/s, a tenth of them high", markdown(table)]


def _figures_14_15(rows: Sequence[Row]) -> list[str]:
    parts = []
    titles = {
        "14": "### Auto-scaling (Fig. 14): L-L, band of 160 to 960 steps, cold start of 60 s",
        "15": "### Cost against latency (Fig. 15): L-L, 2 requests/s, CV 2, the band moved",
    }
    for figure, title in titles.items():
        chosen = [row for row in rows if row["figure"] == figure]
        if not chosen:
            continue
        table: Table = [
            [
                "rate",
                "CV",
                "band from, steps",
                "policy",
                "prefill P99 s",
                "mean s",
                "instances",
                "instance-hours",
                "requests",
                "seeds",
            ]
        ]
        points = sorted({(row["rate"], row["cv"], row["scale_low_steps"]) for row in chosen})
        for rate, cv, low in points:
            for policy in (BASELINE, "llumnix", "kvferry"):
                mine = [
                    row
                    for row in chosen
                    if (row["rate"], row["cv"], row["scale_low_steps"], row["policy"]) == (rate, cv, low, policy)
                ]
                if mine:
                    names = ("prefill_p99_s", "prefill_mean_s", "instances_mean", "instance_hours")
                    values = [number(mean_of(mine, name, lambda row: True)) for name in names]
                    point = [f"{rate:g}", f"{cv:g}", f"{low:g}", policy]
                    table.append([*point, *values, _requests(mine), str(len(mine))])
        parts += [title, markdown(table)]
    return parts


def _of(load: str, policy: str, trace: str | None = None) -> Callable[[Row], bool]:
    return lambda row: (
        row["figure"] == "11"
        and row["load"] == load
        and row["policy"] == policy
        and (trace is None or row["trace"] == trace)
    )


def _requests(rows: Sequence[Row]) -> str:
    return f"{min(row['requests'] for row in rows):,}"


def _gain(found: Gain | None) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return number(found.mean)
    return f"{number(found.mean)} ({number(found.low)}-{number(found.high)})"
