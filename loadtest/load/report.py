"""The report of a load test: a page with plots, and its figures as JSON beside it."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.measures import quantile
from loadtest.load.journal import SHARES, Journal, Stream

BINS = 60
"""A plot over time has so many points at most."""
ROWS = (
    ("first token, ms", "ttft_ms"),
    ("gap between two tokens, ms", "token_gap_ms"),
    ("longest gap of a stream, ms", "longest_gap_ms"),
    ("last byte, ms", "last_byte_ms"),
    ("sent later than planned, ms", "sent_late_ms"),
)
COUNTS = ("streams", "broken", "unfinished", "not_kept", "seconds", "sent_per_s", "tokens_per_s")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def write(journal: Journal, about: dict[str, Any], directory: Path) -> Path:
    """``report.html`` and ``result.json`` there; the page's path. Without matplotlib it has no plots, and says so."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = journal.figures()
    (directory / "result.json").write_text(json.dumps({"about": about, **figures}, indent=1) + "\n")
    try:
        plots = draw(journal)
    except ModuleNotFoundError:
        plots = "<p>No plots: matplotlib is not installed.</p>"
    page = directory / "report.html"
    page.write_text(_page(figures, about, plots))
    return page


def table(figures: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [" ".join(f"{name} {figures[name]}" for name in COUNTS[:3]) + f", {figures['sent_per_s']} sent a second"]
    lines.append(" " * 28 + "".join(name.rjust(11) for name, _ in SHARES))
    for title, name in ROWS:
        cells = figures[name] or {}
        lines.append(title.ljust(28) + "".join(_cell(cells.get(share)).rjust(11) for share, _ in SHARES))
    lines += [f"{count:>8} x {what}" for what, count in figures["failures"].items()]
    return "\n".join(lines)


def _page(figures: dict[str, Any], about: dict[str, Any], plots: str) -> str:
    latencies = [[title, *(_cell((figures[name] or {}).get(share)) for share, _ in SHARES)] for title, name in ROWS]
    for priority, shares in figures["ttft_ms_by_priority"].items():
        title = f"first token of priority {priority}, ms"
        latencies.append([title, *(_cell((shares or {}).get(share)) for share, _ in SHARES)])
    failures = [[what, str(count)] for what, count in figures["failures"].items()]
    parts = [
        "<!doctype html><meta charset=utf-8><title>kvferry load test</title>",
        f"<style>{STYLE}</style><h1>Load test</h1>",
        _table(["", *(name for name, _ in SHARES)], latencies),
        _table(["", "number"], [[name, _cell(figures[name])] for name in COUNTS]),
        "<h2>What was wrong</h2>" + (_table(["", "streams"], failures) if failures else "<p>Nothing.</p>"),
        plots,
        "<h2>Asked for</h2>" + _table(["", ""], [[name, str(value)] for name, value in about.items()]),
    ]
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def draw(journal: Journal) -> str:
    """SVG. Raises ModuleNotFoundError."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 9}):
        figure = Figure(figsize=(11, 7), layout="constrained")
        (upper_left, upper_right), (lower_left, lower_right) = figure.subplots(2, 2)
        _distributions(upper_left, journal)
        _over_time(upper_right, journal, "first token", lambda stream: stream.ttft_s)
        _over_time(lower_left, journal, "longest gap of a stream", lambda stream: stream.gap_max_s)
        _streams(lower_right, journal)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _distributions(axes: Any, journal: Journal) -> None:
    whole = [stream for stream in journal.streams if stream.wrong is None]
    series = {
        "first token": sorted(stream.ttft_s for stream in whole if stream.ttft_s is not None),
        "last byte": sorted(stream.seconds for stream in whole),
    }
    for label, values in series.items():
        if values:
            axes.plot(*_thinned([v * 1000 for v in values]), label=label)
    if points := journal.gap_points():
        axes.plot([s * 1000 for s, _ in points], [share for _, share in points], label="gap between two tokens")
    axes.set(xscale="log", xlabel="ms", ylabel="share that is no longer", ylim=(0, 1), title="Distributions")
    _finish(axes)


def _thinned(values: Sequence[float], points: int = 500) -> tuple[list[float], list[float]]:
    """Of a sorted list: as many points as can be seen, and the last one."""
    every = max(1, len(values) // points)
    chosen = sorted({*range(0, len(values), every), len(values) - 1})
    return [values[index] for index in chosen], [(index + 1) / len(values) for index in chosen]


def _over_time(axes: Any, journal: Journal, title: str, read: Callable[[Stream], float | None]) -> None:
    width_s = _bin_width_s(journal)
    bins: dict[int, list[float]] = {}
    for stream in journal.streams:
        if (value := read(stream)) is not None:
            bins.setdefault(int(stream.asked_at / width_s), []).append(value * 1000)
    times = sorted(bins)
    for name, share in (SHARES[0], SHARES[2]):
        axes.plot([time * width_s for time in times], [quantile(bins[time], share) for time in times], label=name)
    axes.set(yscale="log", xlabel="s, when it was sent", ylabel="ms", title=title.capitalize())
    _finish(axes)


def _streams(axes: Any, journal: Journal) -> None:
    width_s = _bin_width_s(journal)
    count = int(max((stream.ended_at for stream in journal.streams), default=0.0) / width_s) + 1
    sent, ended, broken, open_now = ([0] * count for _ in range(4))
    for stream in journal.streams:
        first, last = int(stream.asked_at / width_s), int(stream.ended_at / width_s)
        sent[first] += 1
        ended[last] += 1
        broken[last] += stream.wrong is not None
        open_now[first] += 1
        if last + 1 < count:
            open_now[last + 1] -= 1
    times = [number * width_s for number in range(count)]
    axes.plot(times, [one / width_s for one in sent], label="sent a second")
    axes.plot(times, [one / width_s for one in ended], label="ended a second")
    axes.plot(times, _running_sum(open_now), label="under way")
    axes.plot(times, broken, label="broken", color="#b3563f")
    axes.set(xlabel="s", ylabel="streams", title="Streams")
    axes.set_ylim(bottom=0)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _running_sum(values: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _bin_width_s(journal: Journal) -> float:
    return max(1.0, max((stream.ended_at for stream in journal.streams), default=0.0) / BINS)
