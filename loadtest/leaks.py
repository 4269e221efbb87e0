"""What must not be left, or grow, when traffic has stopped: requests, blocks, legs, connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.client import Client
from loadtest.stack import Stack

PROC = Path("/proc")
OPEN_STATES = {"01": "established", "08": "close_wait"}
"""As /proc/net/tcp has them (include/net/tcp_states.h). A socket in CLOSE_WAIT is one that its owner has forgotten."""
IDLE_CONNECTIONS_MAX = 8
"""What pools may hold at any moment, by process group: those of probes (three at once), pulses and model lists, one to
a peer's llumlet, one between KV agents, a llumlet's two to its own agent, whose ends are both within the group, and a
few of each where a stall let several run at once: a pool uses its connections by turns, so that none of them stays idle
for the five seconds after which it is closed."""
EMPTY_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process group (a server with its engine and workers, or the gateway) holds of the machine."""

    connections: Mapping[str, int]
    """By state."""
    descriptors: int
    threads: int


def footprint(group: int, proc: Path = PROC) -> Footprint:
    sockets: set[str] = set()
    tables: set[str] = set()
    descriptors = threads = 0
    for process in _members(group, proc):
        try:
            links = _links(process / "fd")
            threads += len(list((process / "task").iterdir()))
            tables |= {(process / f"net/{name}").read_text() for name in ("tcp", "tcp6")}
        except OSError:  # It has just ended.
            continue
        descriptors += len(links)
        sockets |= {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    states: dict[str, str] = {}
    for table in tables:
        states |= read_tcp_table(table)
    connections = Counter(states[inode] for inode in sockets if inode in states)
    return Footprint(dict(sorted(connections.items())), descriptors, threads)


def read_tcp_table(text: str) -> dict[str, str]:
    """The open connections of /proc/net/tcp: inode to state."""
    found: dict[str, str] = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        if (state := OPEN_STATES.get(fields[3])) is not None:
            found[fields[9]] = state
    return found


def _links(directory: Path) -> list[str]:
    links = []
    for link in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed between the two looks.
            links.append(str(link.readlink()))
    return links


def _members(group: int, proc: Path) -> list[Path]:
    members = []
    for stat in proc.glob("[0-9]*/stat"):
        try:
            # pid (name, may hold spaces and brackets) state ppid pgrp ...
            group_id = int(stat.read_text().rpartition(")")[2].split()[2])
        except (OSError, ValueError, IndexError):
            continue
        if group_id == group:
            members.append(stat.parent)
    return members


def footprints(stack: Stack) -> dict[str, Footprint]:
    groups = {f"server {instance.id}": instance.pid for instance in stack.instances}
    if stack.gateway is not None:
        groups["gateway"] = stack.gateway.pid
    return {name: footprint(group) for name, group in groups.items()}


def growth(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[str]:
    """Connections beyond those before and what pools may hold; empty: none."""
    found = []
    for name, then in before.items():
        for state in OPEN_STATES.values():
            had, has = then.connections.get(state, 0), after[name].connections.get(state, 0)
            if has > had + (IDLE_CONNECTIONS_MAX if state == "established" else 0):
                found.append(f"{name} has {has} connections in state {state}, and had {had}")
    return found


async def held(client: Client) -> list[str]:
    """What instances and gateway still hold of requests; empty: nothing."""
    found = []
    for instance in client.stack.instances:
        status = await client.status(instance.id)
        found += held_by_report(instance.id, status["report"], len(status["requests"]))
    answers = [
        (await client.http.get(f"{client.url}/admin/{name}", headers=client.admin_headers())).json()
        for name in ("instances", "requests")
    ]
    return found + held_by_gateway(answers[0]["instances"], answers[1]["requests"])


def held_by_gateway(instances: Sequence[Mapping[str, Any]], requests: Sequence[Any]) -> list[str]:
    """By its answers to ``/admin/instances`` and ``/admin/requests``."""
    found = [f"the gateway has {one['in_flight']} legs at {one['id']}" for one in instances if one["in_flight"]]
    return found + ([f"the gateway has {len(requests)} requests under way"] if requests else [])


def held_by_report(instance_id: str, report: Mapping[str, Any], requests: int) -> list[str]:
    counts = {
        "requests": requests,
        "blocks in use": report["blocks_total"] - report["blocks_free"],
        "blocks reserved": report["blocks_reserved"],
        "migrations in": report["migrations_in"],
        "migrations out": report["migrations_out"],
    }
    return [f"{instance_id} has {count} {name}" for name, count in counts.items() if count]


async def left_over(client: Client, before: Mapping[str, Footprint], timeout_s: float = EMPTY_TIMEOUT_S) -> list[str]:
    """What has not gone away by then. Reports and idle connections lag behind, so that it takes a few seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await held(client) + growth(before, footprints(client.stack))
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(POLL_INTERVAL_S)
