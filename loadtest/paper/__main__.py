"""Runs the paper's experiments: ``python -m loadtest.paper --figures 11T --seeds 6``; see ``make paper``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.paper.evaluation import describe, write_page
from loadtest.paper.figures import FIGURES, QUICK_FIGURES
from loadtest.paper.plots import NoMatplotlib, draw_all
from loadtest.paper.rows import Row, key_of, read_rows, run_all, write_rows
from loadtest.progress import Progress

RESULT = Path("docs/results/paper.json")
PAGE = Path("docs/evaluation.md")
PLOTS = Path("docs/plots")
SEEDS = 6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.paper", description=__doc__)
    parser.add_argument("--figures", default="", help=f"comma-separated: {', '.join(FIGURES)} (default all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds a point (default {SEEDS})")
    parser.add_argument("--requests", type=int, help="of each run, instead of the paper's 10,000")
    parser.add_argument("--policies", default="", help="only these, comma-separated")
    parser.add_argument("--quick", action="store_true", help="one seed, three traces, into another file")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="side by side")
    parser.add_argument("--output", type=Path, help=f"default {RESULT}")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, run those that are not")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--no-page", action="store_true", help="leave docs/evaluation.md as it is")
    flags = parser.parse_args()
    output = flags.output or (Path(".cache/paper-quick.json") if flags.quick else RESULT)
    names = flags.figures.split(",") if flags.figures else list(QUICK_FIGURES if flags.quick else FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]}")
    seeds = 1 if flags.quick else flags.seeds
    jobs = [job for name in names for job in FIGURES[name](seeds, flags.quick)]
    if flags.requests is not None:
        jobs = [dataclasses.replace(job, requests=flags.requests) for job in jobs]
    if flags.policies:
        jobs = [job for job in jobs if job.policy in flags.policies.split(",")]
    rows = {key_of(row): row for row in read_rows(output)}
    if not flags.resume:
        rows = {key: row for key, row in rows.items() if key not in {job.key for job in jobs}}
    jobs = [job for job in jobs if job.key not in rows]
    about = about_the_run()

    with Progress().step(f"{len(jobs)} runs into {output}") as step:
        count = 0

        def done(row: Row) -> None:
            nonlocal count
            count += 1
            rows[key_of(row)] = row
            write_rows(output, rows.values(), about)
            step.update(f"{count} of {len(jobs)}: {row['figure']} {row['trace']} {row['policy']} seed {row['seed']}")

        stops_at = time.monotonic() + flags.stop_after_s
        run_all(jobs, flags.processes, done, lambda: time.monotonic() >= stops_at)
    print(describe(list(rows.values())))
    if not flags.quick and not flags.no_page:
        write_page(PAGE, list(rows.values()), output, drawn(list(rows.values()), PLOTS))
    return 0


def drawn(rows: list[Row], directory: Path) -> list[Path]:
    try:
        return draw_all(rows, directory)
    except NoMatplotlib as error:
        print(error, file=sys.stderr)
        return []


def about_the_run() -> dict[str, Any]:
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kvferry": importlib.metadata.version("kvferry"),
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
