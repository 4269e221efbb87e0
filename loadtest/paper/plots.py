"""The figures as SVG, the paper's points beside ours. The same rows give the same files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.paper.gains import BASELINE
from loadtest.paper.papers_points import Points, Series, papers_points
from loadtest.paper.parameters import TOP_RATES_RPS
from loadtest.paper.rows import SPAN_S, Row

COLORS = {
    "infaas++": "#777777",
    "round-robin": "#c79a2b",
    "llumnix": "#b3563f",
    "llumnix-base": "#777777",
    "late-binding": "#5a9a5a",
    "kvferry": "#2b6ca3",
    "kvferry-base": "#8fb4d3",
    "central": "#b3563f",
}
PAPERS = {"linestyle": "--", "marker": "x", "markersize": 5, "alpha": 0.7}
OURS = {"linestyle": "-", "marker": "o", "markersize": 4}


class NoMatplotlib(RuntimeError):
    """The plots' library is not installed; a sentence that says what to do."""


def draw_all(rows: Sequence[Row], directory: Path) -> list[Path]:
    """One file for each figure that has rows. Raises NoMatplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NoMatplotlib("The plots need matplotlib: pip install 'kvferry[bench]'.") from None
    directory.mkdir(parents=True, exist_ok=True)
    paper, drawn = papers_points(), []
    for name, (draw, panels) in FIGURES.items():
        mine = [row for row in rows if row["figure"] == name]
        if not mine:
            continue
        # Text stays text, and nothing depends on when or where it was drawn.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 9}):
            figure = Figure(figsize=(10, 3.8), layout="constrained")
            draw(list(figure.subplots(1, panels, squeeze=False)[0]), mine, paper)
            path = directory / f"figure-{name}.svg"
            figure.savefig(path, metadata={"Date": None})
        drawn.append(path)
    return drawn


def _figure_11(axes: list[Any], rows: Sequence[Row], paper: Series) -> None:
    """Gains over INFaaS++, trace by trace, at its highest rates in the paper and at load T here."""
    titles = {"prefill_p99_s": "P99 prefill", "decode_p99_s_per_token": "P99 decode"}
    traces = list(TOP_RATES_RPS)
    for panel, (metric, title) in zip(axes, titles.items(), strict=True):
        bars: list[tuple[str, str, list[float | None]]] = [
            ("Llumnix in the paper", "#d9a79b", [_papers_gain(paper, trace, metric) for trace in traces])
        ]
        bars += [
            (f"{policy}, load T", COLORS[policy], [_gain(rows, "T", trace, policy, metric) for trace in traces])
            for policy in ("llumnix", "late-binding", "kvferry")
        ]
        for index, (label, color, values) in enumerate(bars):
            at = [place + (index - 1.5) * 0.2 for place, value in enumerate(values) if value is not None]
            heights = [value - 1 for value in values if value is not None]
            panel.bar(at, heights, 0.19, bottom=1, color=color, label=label)
        panel.axhline(1, color="#333333", linewidth=0.8)
        panel.set_yscale("log")
        ticks = (0.5, 1, 2, 5, 10, 20) if metric == "prefill_p99_s" else (0.8, 1, 1.25, 1.5, 2)
        panel.set_yticks(ticks, [f"{one:g}" for one in ticks])
        panel.minorticks_off()
        panel.set_xticks(range(len(traces)), traces, rotation=30)
        _finish(panel, f"{title}, times better than INFaaS++", "", "")


def _papers_gain(paper: Series, trace: str, metric: str) -> float | None:
    """At the highest rate that both have."""
    before, after = (dict(paper.get(("11", trace, policy, metric), [])) for policy in (BASELINE, "llumnix"))
    rates = [rate for rate in before if after.get(rate)]
    return before[max(rates)] / after[max(rates)] if rates else None


def _gain(rows: Sequence[Row], load: str, trace: str, policy: str, metric: str) -> float | None:
    """Geometric mean over the seeds that both have."""
    found = {(row["policy"], row["seed"]): row[metric] for row in rows if row["load"] == load and row["trace"] == trace}
    ratios = [
        found[BASELINE, seed] / value
        for (name, seed), value in found.items()
        if name == policy and value and found.get((BASELINE, seed))
    ]
    return statistics.geometric_mean(ratios) if ratios else None


def _figure_12(axes: list[Any], rows: Sequence[Row], paper: Series) -> None:
    for panel, rate in zip(axes, sorted({row["rate"] for row in rows}), strict=False):
        for policy in ("infaas++", "llumnix", "late-binding", "kvferry"):
            mine = [row for row in rows if row["rate"] == rate and row["policy"] == policy]
            if mine:
                shares = min(mine, key=lambda row: int(row["seed"]))["fragmentation_by_10_s_share"]
                times = [SPAN_S * index / 60 for index in range(len(shares))]
                panel.plot(times, [100 * one for one in shares], color=COLORS[policy], label=policy, linewidth=0.9)
        _finish(panel, f"M-M, {rate:g} requests/s, seed 1", "minutes", "fragmented, % of all memory")


def _figure_13(axes: list[Any], rows: Sequence[Row], paper: Series) -> None:
    """The paper's requests are as slow as ours in the mean, but not to the second: so each beside its own base."""
    for panel, (word, title) in zip(axes, {"high": "High priority", "normal": "Normal"}.items(), strict=True):
        metric = "request_mean_s"
        base, own = (paper[("13", word, policy, metric)] for policy in ("llumnix-base", "llumnix"))
        points = [(x, before / after) for (x, before), (_, after) in zip(base, own, strict=True)]
        _line(panel, points, "llumnix", "Llumnix in the paper", PAPERS)
        for policy in ("llumnix", "kvferry"):
            before, after = (_means(rows, "cv", name, f"{word}_{metric}") for name in (f"{policy}-base", policy))
            points = [(x, before[x] / value) for x, value in sorted(after.items()) if x in before]
            _line(panel, points, policy, policy, OURS)
        panel.axhline(1, color="#333333", linewidth=0.8)
        _finish(panel, f"{title}: mean latency, times better than without classes", "CV", "")


def _figure_14(axes: list[Any], rows: Sequence[Row], paper: Series) -> None:
    for index, (sweep, axis, title) in enumerate(
        (("poisson_rate", "rate", "Poisson arrivals"), ("gamma_cv", "cv", "2 requests/s, bursts"))
    ):
        mine = [row for row in rows if (row["cv"] == 1.0 if axis == "rate" else row["rate"] == 2.0)]
        for offset, metric in enumerate(("prefill_p99_s", "instances_mean")):
            panel = axes[2 * index + offset]
            for policy in (BASELINE, "llumnix"):
                _line(panel, paper.get(("14", sweep, policy, metric), []), policy, f"{policy} in the paper", PAPERS)
            for policy in (BASELINE, "llumnix", "kvferry"):
                _line(panel, sorted(_means(mine, axis, policy, metric).items()), policy, policy, OURS)
            if metric == "prefill_p99_s":
                panel.set_yscale("log")
            what = "P99 prefill, s" if metric == "prefill_p99_s" else "instances in the mean"
            _finish(panel, title, "requests/s" if axis == "rate" else "CV", what, legend=index + offset == 0)


def _figure_15(axes: list[Any], rows: Sequence[Row], paper: Series) -> None:
    """Down and to the left is better."""
    for policy in (BASELINE, "llumnix"):
        _line(axes[0], paper[("15", "", policy, "prefill_p99_s")], policy, f"{policy} in the paper", PAPERS)
    for policy in (BASELINE, "llumnix", "kvferry"):
        cost = _means(rows, "scale_low_steps", policy, "instances_mean")
        wait = _means(rows, "scale_low_steps", policy, "prefill_p99_s")
        _line(axes[0], sorted((cost[low], wait[low]) for low in cost), policy, policy, OURS)
    axes[0].set_yscale("log")
    _finish(axes[0], "L-L, 2 requests/s, CV 2, the band moved", "instances in the mean", "P99 prefill, s")


def _figure_16(axes: list[Any], rows: Sequence[Row], paper: Series) -> None:
    panels = {"stall_mean_ms": "a step's stall, ms", "scheduler_busy_share": "scheduler's thread busy, share"}
    for panel, (metric, what) in zip(axes, panels.items(), strict=True):
        for policy in ("central", "kvferry"):
            for instances in sorted({row["instances"] for row in rows}):
                points = [
                    (64 * row["rate"] / instances, row[metric])
                    for row in rows
                    if row["instances"] == instances and row["policy"] == policy
                ]
                style = OURS | {"linestyle": {64: ":", 256: "--"}.get(instances, "-")}
                _line(panel, sorted(points), policy, f"{policy}, {instances:,} instances", style)
        panel.set_yscale("log")
        _finish(panel, "", "requests/s for each 64 instances", what, legend=metric == "stall_mean_ms")


FIGURES: Mapping[str, tuple[Callable[[list[Any], Sequence[Row], Series], None], int]] = {
    "11": (_figure_11, 2),
    "12": (_figure_12, 2),
    "13": (_figure_13, 2),
    "14": (_figure_14, 4),
    "15": (_figure_15, 1),
    "16": (_figure_16, 2),
}
"""What draws it, into how many panels."""


def _means(rows: Sequence[Row], axis: str, policy: str, metric: str) -> dict[float, float]:
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["policy"] == policy and row.get(metric) is not None:
            found.setdefault(row[axis], []).append(row[metric])
    return {x: statistics.fmean(values) for x, values in found.items()}


def _line(axes: Any, points: Points, policy: str, label: str, style: Mapping[str, Any]) -> None:
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], color=COLORS[policy], label=label, **style)


def _finish(axes: Any, title: str, across: str, up: str, *, legend: bool = True) -> None:
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(frameon=False, fontsize=8)
