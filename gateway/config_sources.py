"""Where a setting's value comes from: a flag, else the environment, else the file, else its default."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError

PREFIX = "KVFERRY_"
FILE_FLAG = ("--config", "KVFERRY_CONFIG", "", "TOML file of settings, with the keys that --check prints")
LISTS = ("KVFERRY_INSTANCES", "KVFERRY_API_KEYS")
"""Comma-separated in flags and variables; in the file they may be arrays."""
TABLES = ("KVFERRY_CAPS", "KVFERRY_TARGET_LOADS")
"""``n=16,stop=8`` in flags and variables; in the file they may be tables."""
NEAR = 0.7
"""How alike two names must be for one to be a slip for the other, from 0 to 1."""
_SECRET = re.compile(r"(SECRET|KEY|KEYS|PASSWORD|TOKEN)$")
_NAMED = re.compile(r"(KVFERRY_[A-Z0-9_]+)(?: \(--[a-z0-9-]+\))?")
_PASSWORDS = re.compile(r"(?<=://)[^/@\s]*(?=@)|(?<=[?&]password=)[^&\s]*")

OTHERS = (
    *("KVFERRY_CONFIG", "KVFERRY_URL", "KVFERRY_ADMIN_KEY_FILE"),
    *("KVFERRY_INSTANCE_ID", "KVFERRY_ADVERTISE_HOST", "KVFERRY_DRAIN_TIMEOUT_S", "KVFERRY_GROWTH_TOKENS"),
    "KVFERRY_ALLOW_UNTESTED_VLLM",
)
"""The commands' own and the plugin's: one file of variables may serve all of them."""
_FOREIGN = re.compile(r"([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)\w*|PORT(_\d+_(TCP|UDP)\w*)?)")
"""What Kubernetes puts into every container beside a service of our name."""

Row = tuple[str, str, str, str]
"""Flag, variable, default, meaning."""


@dataclass(frozen=True, slots=True)
class Value:
    text: str
    origin: str | None
    """A flag, a variable, or a key with its file. ``None``: it is the default."""


class Values(Mapping[str, str]):
    """Variable to text."""

    def __init__(self, rows: Sequence[Row], values: Mapping[str, Value]) -> None:
        self._rows = rows
        self._values = values

    def __getitem__(self, variable: str) -> str:
        return self._values[variable].text

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def naming_origins(self, message: str) -> str:
        """A message names a setting as ``KVFERRY_PORT (--port)``, or without its flag; this puts where the value came
        from in its place.
        """

        def origin(found: re.Match[str]) -> str:
            value = self._values.get(found[1])
            return found[0] if value is None or value.origin is None else value.origin

        return _NAMED.sub(origin, message)

    def to_toml(self) -> str:
        """A file that says the same, each line with its origin. What is secret is left out, as a comment."""
        lines = []
        for _, variable, default, _ in self._rows:
            value = self._values[variable]
            shown = _PASSWORDS.sub("***", value.text)
            line = f"{file_key(variable)} = {_toml(variable, shown, default)}"
            if value.text and _SECRET.search(variable):
                line = f"# {file_key(variable)} is hidden"
            elif shown != value.text:
                line = f"# {line}"
            lines.append((line, value.origin or "default"))
        width = max(len(line) for line, _ in lines if len(line) <= 60)
        return "".join(f"{line:{width}}  # {origin}\n" for line, origin in lines)


def file_key(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower()


def flag_attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def gather(rows: Sequence[Row], flags: Mapping[str, Any], environment: Mapping[str, str]) -> Values:
    """Raises :class:`ConfigError` for a file that cannot be read, or that holds what is not a setting."""
    flag, variable, _, _ = FILE_FLAG
    path = flags.get(flag_attribute(flag))
    named_by = flag if path is not None else variable
    path = path if path is not None else environment.get(variable, "")
    in_file = read_file(path, rows, named_by) if path else {}
    values: dict[str, Value] = {}
    for flag, variable, default, _ in rows:
        given = flags.get(flag_attribute(flag))
        if given is not None:
            value = Value(given.strip(), flag)
        elif variable in environment:
            value = Value(environment[variable].strip(), variable)
        else:
            value = in_file.get(variable, Value(default, None))
        values[variable] = value
    return Values(rows, values)


def unknown_variables(rows: Sequence[Row], environment: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Those with our prefix that nobody reads, each with the one that may have been meant."""
    known = {variable.removeprefix(PREFIX) for _, variable, _, _ in rows} | {one.removeprefix(PREFIX) for one in OTHERS}
    given = [name.removeprefix(PREFIX) for name in sorted(environment) if name.startswith(PREFIX)]
    unknown = [name for name in given if name not in known and not _FOREIGN.fullmatch(name)]
    near = ((name, difflib.get_close_matches(name, sorted(known), n=1, cutoff=NEAR)) for name in unknown)
    return [(PREFIX + name, PREFIX + found[0] if found else None) for name, found in near]


def read_file(path: str, rows: Sequence[Row], named_by: str) -> dict[str, Value]:
    """Variable to value. ``named_by``: the flag or variable that the file's name came from."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{named_by}: {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named_by}: {path} is not TOML: {error}.") from error
    by_key = {file_key(variable): (variable, default) for _, variable, default, _ in rows}
    unknown = [_unknown(key, list(by_key)) for key in found if key not in by_key]
    if unknown:
        raise ConfigError(f"{path}: {'; '.join(unknown)}.")
    values = {}
    for key, value in found.items():
        variable, default = by_key[key]
        text = _text(variable, value, default)
        if text is None:
            raise ConfigError(f"{key} in {path} must be {_kind(variable, default)}.")
        values[variable] = Value(text.strip(), f"{key} in {path}")
    return values


def _unknown(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key.lower().removeprefix(PREFIX.lower()).replace("-", "_"), known, n=1)
    return f"{key} is not a setting" + (f" (did you mean {close[0]}?)" if close else "")


def _text(variable: str, value: Any, default: str) -> str | None:
    """As a flag would say it. ``None``: of a type that this setting does not have."""
    match value:
        case str():
            return value
        case bool():
            return _switch(value) if _is_switch(default) else None
        case int() | float():
            return f"{value}" if _is_number(default) else None
        case list() if variable in LISTS and all(isinstance(one, str) and "," not in one for one in value):
            return ",".join(value)
        case dict() if variable in TABLES and all(type(one) is int for one in value.values()):
            return ",".join(f"{name}={one}" for name, one in value.items())
        case _:
            return None


def _kind(variable: str, default: str) -> str:
    if variable in LISTS:
        return "an array of strings without commas"
    if variable in TABLES:
        return "a table of whole numbers"
    if _is_number(default):
        return "a number"
    return "true or false" if _is_switch(default) else "a string"


def _toml(variable: str, text: str, default: str) -> str:
    if variable in LISTS:
        return json.dumps([item.strip() for item in text.split(",") if item.strip()], ensure_ascii=False)
    if not _is_number(default):
        return json.dumps(text, ensure_ascii=False)
    return str(int(text)) if text.isdecimal() else repr(float(text))


def _is_number(default: str) -> bool:
    return default.replace(".", "", 1).isdecimal()


def _is_switch(default: str) -> bool:
    return default in ("on", "off")


def _switch(value: bool) -> str:
    return "on" if value else "off"
