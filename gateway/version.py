"""Which kvferry this is."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    try:
        return importlib.metadata.version("kvferry")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
