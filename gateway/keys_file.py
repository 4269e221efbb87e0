"""The file of API keys: TOML, one table a key, which holds the key's SHA-256 and what it may do.

[keys.alice]
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
requests_per_minute = 60
tokens_per_minute = 100000
concurrent_requests = 4
priority = "normal"
"""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from pathlib import Path
from typing import Any

from gateway.access import Key, Keys
from gateway.errors import ConfigError
from gateway.policy.limits import KeyLimits
from gateway.telemetry import log
from gateway.wire import PriorityClass, is_identifier

VARIABLE = "KVFERRY_KEYS_FILE"
LIMIT_MAX = 10**12
LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))
CLASSES = {one.word: one for one in PriorityClass}


def read_keys_file(path: str) -> tuple[Key, ...]:
    """Raises :class:`ConfigError`, which names the file and the field. A file without a key is an error too: it must
    not open the gateway to everyone.
    """
    try:
        return _keys(_tables(path))
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE} (--keys-file): {path}: {error.message}") from None


def names_in(path: str) -> frozenset[str]:
    """Of the keys in a file, which may be wrong otherwise. Raises :class:`ConfigError` for one that is not TOML."""
    entries = _tables(path).get("keys")
    return frozenset(entries) if isinstance(entries, dict) else frozenset()


def _tables(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{VARIABLE} (--keys-file) cannot be read: {error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{VARIABLE} (--keys-file): {path} is not TOML: {error}.") from error


class KeysFile:
    """Reads the file again when it has changed. One that is wrong, or gone, changes nothing and is logged once."""

    def __init__(self, path: str, keys: Keys) -> None:
        self._path = path
        self._keys = keys
        self._read: tuple[int, ...] = ()

    async def look(self) -> None:
        self._read_if_changed()

    def _read_if_changed(self) -> None:
        state: tuple[int, ...]
        try:
            found = Path(self._path).stat()
            state = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            state = (0,)
        if state == self._read:
            return
        self._read = state
        try:
            named = read_keys_file(self._path)
        except ConfigError as error:
            log("keys_file_refused", level=logging.WARNING, reason=error.message)
            return
        self._keys.replace_named(named)
        log("keys_file_read", keys=len(named))


def _keys(tables: dict[str, Any]) -> tuple[Key, ...]:
    for name in tables:
        if name != "keys":
            raise ConfigError(f"{name} is not known; there is only [keys.NAME].")
    entries = tables.get("keys")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError("there is no key in it: add one with `kvferry keys new NAME`.")
    keys = tuple(read_entry(name, entry) for name, entry in entries.items())
    if len({key.sha256 for key in keys}) != len(keys):
        raise ConfigError("two keys have the same sha256.")
    return keys


def read_entry(name: str, entry: Any) -> Key:
    """Raises :class:`ConfigError`, which names the field."""
    if not is_identifier(name):
        raise ConfigError(f"keys.{name}: a name is made of letters, digits and . _ : -, at most 128.")
    if not isinstance(entry, dict):
        raise ConfigError(f"keys.{name} must be a table, [keys.{name}].")
    known = ("sha256", *LIMITS, "priority")
    for field in entry:
        if field not in known:
            raise ConfigError(f"keys.{name}.{field} is not known; there are {', '.join(known)}.")
    limits = KeyLimits(**{field: _limit(f"keys.{name}.{field}", entry.get(field)) for field in LIMITS})
    return Key(
        name,
        _sha256(f"keys.{name}.sha256", entry.get("sha256")),
        limits if limits != KeyLimits() else None,
        _class(f"keys.{name}.priority", entry.get("priority", PriorityClass.HIGH.word)),
    )


def _sha256(field: str, value: Any) -> bytes:
    message = f"{field} must be 64 hexadecimal digits, as `kvferry keys new NAME` prints them."
    if not isinstance(value, str) or len(value) != 64:
        raise ConfigError(message)
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise ConfigError(message) from None


def _limit(field: str, value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= LIMIT_MAX:
        raise ConfigError(f"{field} must be a whole number from 1 to {LIMIT_MAX}, not {value!r}.")
    return value


def _class(field: str, value: Any) -> PriorityClass:
    if not isinstance(value, str) or value not in CLASSES:
        raise ConfigError(f"{field} must be one of {', '.join(CLASSES)}, not {value!r}.")
    return CLASSES[value]
