"""What commands print: tables for people, JSON for scripts. Colours and the terminal's width only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from gateway.cli.exits import CommandFailed, Exit

PIPE_COLUMNS = 10_000
"""Nothing is cut or folded where no terminal is."""
SHORT = 12
STYLES = {"ready": "green", "running": "green", "draining": "yellow", "drained": "yellow", "stale": "yellow"}
STYLES |= {"down": "red", "no": "dim"}

Cells = Sequence[object]


def print_json(value: Any, *, one_line: bool = False) -> None:
    print(json.dumps(value, indent=None if one_line else 2), flush=True)


def print_sentence(text: str) -> None:
    print(printable(text))


def print_table(head: Sequence[str], rows: Sequence[Cells]) -> None:
    print(render(table(head, rows)))


def table(head: Sequence[str], rows: Sequence[Cells]) -> Any:
    """For :func:`render`. Numbers stand to the right. On a terminal that is too narrow the long cells are folded."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(head):
        is_number = any(isinstance(row[index], int | float) for row in rows)
        is_short = all(len(shown(row[index])) <= SHORT for row in rows)
        made.add_column(title, justify="right" if is_number else "left", no_wrap=is_short, overflow="fold")
    for row in rows:
        made.add_row(*(Text(text, style=STYLES.get(text, "")) for text in map(shown, row)))
    return made


def render(*parts: Any) -> str:
    """As text, with the colours in it that standard output can show."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
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
