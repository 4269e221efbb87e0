"""Both sides beside each other: figures, what is asked of them, and the table for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.sim.metrics import percentile
from loadtest.validation.live import Seen

MEANS_WITHIN = 0.15
ALIKE_WITHIN = 0.05
"""A difference between the policies that is smaller on both sides has no direction."""
METRICS = (
    ("first token, mean", "first_token_mean_ms"),
    ("first token, P99", "first_token_p99_ms"),
    ("token gap, mean", "token_gap_mean_ms"),
    ("token gap, P99", "token_gap_p99_ms"),
    ("preemptions", "preemptions"),
    ("migrations", "migrations"),
)
BEGIN, END = "<!-- validate-sim: begin -->", "<!-- validate-sim: end -->"
RUNS = ("without migration", "with migration")

Figures = dict[str, float]


def figures(seen: Seen) -> Figures:
    first, gaps = sorted(seen.first_token_s), sorted(seen.gaps_s)
    return {
        "first_token_mean_ms": round(1000 * statistics.fmean(first), 3),
        "first_token_p99_ms": round(1000 * percentile(first, 0.99), 3),
        "token_gap_mean_ms": round(1000 * statistics.fmean(gaps), 3),
        "token_gap_p99_ms": round(1000 * percentile(gaps, 0.99), 3),
        "preemptions": seen.preemptions,
        "migrations": seen.moves,
        "failed": seen.failed,
    }


def mean_figures(runs: Sequence[Figures]) -> Figures:
    return {name: round(statistics.fmean(run[name] for run in runs), 3) for name in runs[0]}


def verdicts(real: dict[str, Figures], simulated: dict[str, Figures]) -> list[dict[str, Any]]:
    """Of each mean: how far off the simulator is. Of each figure: whether migration changes it the same way."""
    found: list[dict[str, Any]] = []
    for name in ("first_token_mean_ms", "token_gap_mean_ms"):
        for run in RUNS:
            off = simulated[run][name] / real[run][name] - 1
            found.append({"what": f"{name} {run}", "off_share": round(off, 3), "is_met": abs(off) <= MEANS_WITHIN})
    for _, name in METRICS[:5]:
        ways = [_way(side[RUNS[0]][name], side[RUNS[1]][name]) for side in (real, simulated)]
        found.append({"what": f"direction of {name}", "ways": ways, "is_met": ways[0] == ways[1] or "same" in ways})
    return found


def _way(before: float, after: float) -> str:
    if abs(after - before) <= ALIKE_WITHIN * max(before, after):
        return "same"
    return "more" if after > before else "less"


def table(result: dict[str, Any]) -> str:
    real, simulated = result["real"], result["simulated"]
    lines = ["| | " + " | ".join(f"{run}: real | simulated | off" for run in RUNS) + " |", "|---" * 7 + "|"]
    for title, name in METRICS:
        cells = []
        for run in RUNS:
            one, other = real[run][name], simulated[run][name]
            off = f"{other / one - 1:+.0%}" if one and name.endswith("_ms") else ""
            unit = " ms" if name.endswith("_ms") else ""
            cells += [f"{one:.3g}{unit}", f"{other:.3g}{unit}", off]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    missed = [one for one in result["verdicts"] if not one["is_met"]]
    lines += [
        "",
        "Bars: " + ("all met." if not missed else "missed: " + "; ".join(_missed(one) for one in missed) + "."),
    ]
    return "\n".join(lines)


def _missed(one: dict[str, Any]) -> str:
    if "off_share" in one:
        return f"{one['what']} {one['off_share']:+.0%}"
    return f"{one['what']} ({one['ways'][0]} in truth, {one['ways'][1]} simulated)"


def write_page(path: Path, result: dict[str, Any]) -> None:
    """Between its marks; the page's other words are not touched."""
    text = path.read_text()
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        before, rest = f"{text}\n", END + "\n"
    _, _, after = rest.partition(END)
    workload, machine = result["workload"], result["machine"]
    said = (
        f"{workload['requests']} requests at {workload['rate_rps']:.2g} a second, mean of {workload['repeats']} runs; "
        f"{result['at']}, {machine['cores']} cores, load average {machine['load_average_before']:.1f} before."
    )
    path.write_text(f"{before}{BEGIN}\n{said}\n\n{table(result)}\n{END}{after}")
