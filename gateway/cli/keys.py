"""``kvferry keys``: entries for the file of API keys."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Any

from gateway.access import digest
from gateway.cli.arguments import add_action, add_actions, runs
from gateway.cli.exits import Exit
from gateway.keys_file import CLASSES, LIMITS, read_entry

KEY_PREFIX = "kvf-"
KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    new = add_action(actions, "new", "make a key: the key itself goes to stderr, once; its entry to stdout")
    new.add_argument("name", metavar="NAME", help="who it is for: letters, digits and . _ : -")
    for field in LIMITS:
        new.add_argument(f"--{field.replace('_', '-')}", type=int, metavar="COUNT", help="default: no limit")
    new.add_argument("--priority", choices=list(CLASSES), help="the highest class that it may ask for, default high")
    runs(new, make_key, "kvferry keys new alice --requests-per-minute 60 >> keys.toml")


def make_key(flags: argparse.Namespace) -> int:
    """Raises :class:`ConfigError` for what the file could not hold."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry: dict[str, Any] = {"sha256": digest(key.encode()).hex()}
    entry |= {field: getattr(flags, field) for field in (*LIMITS, "priority") if getattr(flags, field) is not None}
    read_entry(flags.name, entry)
    print(f"The key of {flags.name}, which is shown only this once:\n{key}\n", file=sys.stderr)
    lines = (
        f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}" for field, value in entry.items()
    )
    print("\n".join([f'[keys."{flags.name}"]', *lines]) + "\n")
    return Exit.OK
