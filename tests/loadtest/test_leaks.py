"""The soak's look at what is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loadtest.leaks import (
    IDLE_CONNECTIONS_MAX,
    Footprint,
    footprint,
    growth,
    held_by_gateway,
    held_by_report,
    read_tcp_table,
)

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 20 4 0 10 -1
   2: 0100007F:1F90 0100007F:C002 08 00000000:00000000 00:00000000 00000000     0        0 13 1 0 20 4 0 10 -1
   3: 0100007F:1F90 0100007F:C003 06 00000000:00000000 00:00000000 00000000     0        0 0 3 0
"""


def test_of_a_table_only_open_connections_count() -> None:
    assert read_tcp_table(TABLE) == {"12": "established", "13": "close_wait"}


def test_connections_are_found_by_the_descriptors_of_the_whole_group(tmp_path: Path) -> None:
    for pid, group, inodes in ((50, 50, ["11", "12"]), (51, 50, ["13", "12"]), (60, 60, ["12"])):
        process = tmp_path / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "task/1").mkdir(parents=True)
        (process / "net").mkdir()
        (process / "stat").write_text(f"{pid} (a (b) c) S 1 {group} {group} 0")
        (process / "net/tcp").write_text(TABLE)
        (process / "net/tcp6").write_text(TABLE.splitlines()[0])
        for number, inode in enumerate(inodes):
            (process / f"fd/{number}").symlink_to(f"socket:[{inode}]")
    assert footprint(50, tmp_path) == Footprint({"close_wait": 1, "established": 1}, descriptors=4, threads=2)


CONNECTED = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("open", flush=True)
    sys.stdin.readline()
print("closed", flush=True)
sys.stdin.readline()
"""


def test_a_connection_is_seen_while_it_is_open() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", CONNECTED], stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert footprint(process.pid).connections == {"established": 1}
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert footprint(process.pid).connections == {}


def test_more_connections_than_pools_keep_are_a_leak() -> None:
    before = {"gateway": Footprint({"established": 6}, 0, 0)}
    idle = {"gateway": Footprint({"established": 6 + IDLE_CONNECTIONS_MAX}, 0, 0)}
    leaking = {"gateway": Footprint({"established": 7 + IDLE_CONNECTIONS_MAX}, 0, 0)}
    forgotten = {"gateway": Footprint({"established": 6, "close_wait": 1}, 0, 0)}
    assert growth(before, idle) == []
    assert growth(before, leaking) == [
        f"gateway has {7 + IDLE_CONNECTIONS_MAX} connections in state established, and had 6"
    ]
    assert growth(before, forgotten) == ["gateway has 1 connections in state close_wait, and had 0"]


def test_whatever_an_instance_holds_is_a_leak() -> None:
    report = {"blocks_total": 640, "blocks_free": 640, "blocks_reserved": 0, "migrations_in": 0, "migrations_out": 0}
    assert held_by_report("a", report, 0) == []
    assert held_by_report("a", report, 2) == ["a has 2 requests"]
    assert held_by_report("a", report | {"blocks_free": 639}, 0) == ["a has 1 blocks in use"]
    for name in ("blocks_reserved", "migrations_in", "migrations_out"):
        assert held_by_report("a", report | {name: 1}, 0)


def test_a_leg_or_a_request_that_the_gateway_still_counts_is_a_leak() -> None:
    idle = [{"id": "a", "in_flight": 0}, {"id": "b", "in_flight": 0}]
    assert held_by_gateway(idle, []) == []
    assert held_by_gateway([{"id": "a", "in_flight": -1}], []) == ["the gateway has -1 legs at a"]
    assert held_by_gateway(idle, [{"id": "r"}]) == ["the gateway has 1 requests under way"]
