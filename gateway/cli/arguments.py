"""What the commands' parsers have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeAlias

Run = Callable[[argparse.Namespace], int]
Actions: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """No flag may be shortened: ``--admin-key`` with the key itself would pass for ``--admin-key-file``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            **{"formatter_class": argparse.RawDescriptionHelpFormatter, **arguments},
        )


def add_actions(parser: argparse.ArgumentParser) -> Actions:
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_action(actions: Actions, name: str, meaning: str) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")


def runs(parser: argparse.ArgumentParser, run: Run, *examples: str) -> None:
    """The last thing that is said of a command."""
    parser.set_defaults(run=run)
    parser.epilog = "\n  ".join([f"example{'s' * (len(examples) > 1)}:", *examples])


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """For a command that asks a gateway: see client.py."""
    parser.add_argument(
        "--url",
        metavar="URL",
        help="the gateway; several, comma-separated (KVFERRY_URL, default http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="holds the admin key (KVFERRY_ADMIN_KEY_FILE; the key itself: KVFERRY_ADMIN_KEY)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def seconds(least: float, most: float) -> Callable[[str], float]:
    """A flag's type."""

    def read(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {value!r}")
        return number

    return read
