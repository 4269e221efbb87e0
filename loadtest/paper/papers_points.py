"""What the paper's figures show, as data."""

from __future__ import annotations

import csv
from pathlib import Path

POINTS = Path(__file__).parent / "data" / "papers_points.csv"

Points = list[tuple[float, float]]
Series = dict[tuple[str, str, str, str], Points]
"""By figure, series, policy and metric: x and value, rising in x."""


def papers_points(path: Path = POINTS) -> Series:
    found: Series = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["figure"], row["series"], row["policy"], row["metric"])
            found.setdefault(key, []).append((float(row["x"]), float(row["value"])))
    return {key: sorted(points) for key, points in found.items()}
