"""Rows to tables: each policy's gain over INFaaS++, as a geometric mean over traces, with the spread over seeds."""

from __future__ import annotations

from pathlib import Path

from loadtest.paper.rows import Row


def describe(rows: list[Row]) -> str:
    return f"{len(rows)} rows"


def write_page(path: Path, rows: list[Row], source: Path) -> None:
    """Not written yet."""
