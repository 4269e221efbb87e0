"""Draw the benchmark's figure from its result: `python -m loadtest.bench.plot RESULT.json FIGURE.svg`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from loadtest.bench.result import PAUSE_STEPS_MAX

SERIES = (
    ("recompute", "recompute", "#b3563f", "s"),
    ("blocking", "blocking copy", "#c79a2b", "^"),
    ("live", "live migration", "#2b6ca3", "o"),
)


def draw(result: dict[str, Any], figure_path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, and the same result gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 9}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _compare(left, result)
        _zoom(right, result)
        figure.savefig(figure_path, metadata={"Date": None})


def _compare(axes: Any, result: dict[str, Any]) -> None:
    """Medians with the range from p10 to p90; both axes logarithmic."""
    for method, label, color, marker in SERIES:
        rows = [row for row in result["rows"] if method in row["spread_ms"]]
        lengths = [row["tokens"] for row in rows]
        spreads = [row["spread_ms"][method] for row in rows]
        axes.errorbar(
            lengths,
            [spread["p50"] for spread in spreads],
            yerr=[
                [spread["p50"] - spread["p10"] for spread in spreads],
                [spread["p90"] - spread["p50"] for spread in spreads],
            ],
            label=label,
            color=color,
            marker=marker,
            markersize=4,
            capsize=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("pause beyond the usual gap, ms")
    axes.set_title("Moving a request, three ways")
    _finish(axes, result)


def _zoom(axes: Any, result: dict[str, Any]) -> None:
    """Every live move, beside what it may take."""
    live = [sample for sample in result["samples"] if sample["method"] == "live"]
    axes.plot(
        [sample["tokens"] for sample in live],
        [sample["timing"]["pause_ms"] for sample in live],
        linestyle="none",
        marker="o",
        markersize=3,
        alpha=0.5,
        color="#2b6ca3",
        label="one live migration",
    )
    rows = [row for row in result["rows"] if row["decode_step_ms_p50"] is not None]
    lengths = [row["tokens"] for row in rows]
    steps_ms = [row["decode_step_ms_p50"] for row in rows]
    allowed_ms = [PAUSE_STEPS_MAX * step for step in steps_ms]
    axes.plot(lengths, steps_ms, color="#777777", linestyle=":", label="one decode step of the destination")
    axes.plot(lengths, allowed_ms, color="#777777", label=f"{PAUSE_STEPS_MAX:g} decode steps")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0, top=2.5 * max(allowed_ms, default=1.0))
    axes.set_ylabel("pause beyond the usual gap, ms")
    axes.set_title("Live migration, each move")
    _finish(axes, result)


def _finish(axes: Any, result: dict[str, Any]) -> None:
    lengths = [row["tokens"] for row in result["rows"]]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("tokens of the sequence at the move")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.plot", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("figure", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text()), arguments.figure)
    print(f"drawn in {arguments.figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
