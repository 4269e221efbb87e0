"""``kvferry keys``: entries for the file of API keys."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

from gateway.access import digest
from gateway.cli.arguments import add_action, add_actions, runs
from gateway.cli.exits import CommandFailed, Exit
from gateway.errors import ConfigError
from gateway.keys_file import CLASSES, LIMITS, VARIABLE, names_in, read_entry

KEY_PREFIX = "kvf-"
KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    new = add_action(actions, "new", "make a key: the key itself goes to stderr, once; its entry to stdout")
    new.add_argument("name", metavar="NAME", help="who it is for: letters, digits and . _ : -")
    for field in LIMITS:
        new.add_argument(f"--{field.replace('_', '-')}", type=int, metavar="COUNT", help="default: no limit")
    new.add_argument(
        "--keys-file", metavar="FILE", help="where no key may have this name yet (KVFERRY_KEYS_FILE; or what >> names)"
    )
    new.add_argument("--priority", choices=list(CLASSES), help="the highest class that it may ask for, default high")
    runs(new, make_key, "kvferry keys new alice --requests-per-minute 60 >> keys.toml")


def make_key(flags: argparse.Namespace) -> int:
    """Raises :class:`ConfigError` for what the file could not hold."""
    _check_name(flags.name, flags.keys_file or os.environ.get(VARIABLE))
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


def _check_name(name: str, path: str | None) -> None:
    """Two of a name are no TOML: a gateway would not start with the file any more."""
    taken: list[tuple[str, frozenset[str]]] = []
    if path and Path(path).exists():
        taken.append((path, names_in(path)))
    if (output := _output_file()) is not None:
        with contextlib.suppress(ConfigError):  # It may be any file.
            taken.append(("the file that this is written to", names_in(output)))
    for where, names in taken:
        if name in names:
            raise CommandFailed(
                Exit.FAILED, f"There is a key `{name}` in {where} already: take that out, or name it otherwise."
            )


def _output_file() -> str | None:
    """With ``>> keys.toml``, a way to read that file, on systems that have one."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return None
    path = f"/proc/self/fd/{descriptor}"
    return path if stat.S_ISREG(os.fstat(descriptor).st_mode) and Path(path).exists() else None
