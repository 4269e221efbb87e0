"""What commands print: tables for people, JSON for scripts. Colours and the terminal's width only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

from gateway.cli.exits import CommandFailed, Exit

UNLIMITED = 10_000
"""Columns where no terminal is, and on one that is far too narrow: it then breaks the lines itself."""
FOLDED = 16
"""A column that has to be folded keeps this width."""
GAP = 2
STYLES = {"ready": "green", "running": "green", "draining": "yellow", "drained": "yellow", "stale": "yellow"}
STYLES |= {"down": "red", "no": "dim"}

Cells = Sequence[object]


def print_json(value: Any, *, one_line: bool = False) -> None:
    print(json.dumps(value, indent=None if one_line else 2), flush=True)


def print_sentence(text: str) -> None:
    print(printable(text))


def print_table(head: Sequence[str], rows: Sequence[Cells]) -> None:
    print(table(head, rows))


def table(head: Sequence[str], rows: Sequence[Cells]) -> str:
    """With the colours that standard output can show. Numbers stand to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for index, title in enumerate(head):
        is_number = any(isinstance(row[index], int | float) for row in rows)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        made.add_column(title, justify=justify, no_wrap=widths[index] <= FOLDED, min_width=min(widths[index], FOLDED))
    for row in texts:
        made.add_row(*(Text(text, style=STYLES.get(text, ""), overflow="fold") for text in row))
    console = Console(highlight=False, markup=False, emoji=False)
    least = sum(min(width, FOLDED) for width in widths) + GAP * (len(head) - 1)
    if not sys.stdout.isatty() or console.width < least:
        console.width = UNLIMITED
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case _:
            return printable(str(value)) or "-"


def printable(text: str) -> str:
    """One line without control characters: model names are clients' words, and a terminal obeys escape sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def entries(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects in a gateway's answer."""
    found = answer.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CommandFailed(Exit.UNREACHABLE, f"The answer has no `{name}`: is it a kvferry gateway?")
    return found
