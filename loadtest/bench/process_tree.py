"""What a process and all of its descendants use, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> list[int]:
    """The process ids, the root's first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(root: int) -> float:
    """User and system time of all threads, of those that have ended since as well."""
    used = 0
    for pid in tree(root):
        if fields := _stat(pid):
            used += sum(int(fields[index]) for index in (11, 12))
    return used / _TICKS_PER_S


def memory_bytes(root: int) -> int:
    """Resident."""
    return sum(int(fields[21]) * _PAGE_BYTES for pid in tree(root) if (fields := _stat(pid)))


def _stat(pid: int) -> list[str]:
    """The fields from the third on (proc(5)): state, parent, ...; empty for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
