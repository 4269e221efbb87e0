"""``kvferry drain``: empties an instance, or takes it back."""

from __future__ import annotations

import argparse
from typing import Any

from gateway.cli.arguments import add_admin_flags, runs, seconds
from gateway.cli.client import ANSWER_S, admin_client, segment
from gateway.cli.exits import Exit
from gateway.cli.instances import take_back
from gateway.cli.output import entries, print_json, print_sentence, print_table

TIMEOUT_S = 60.0
TIMEOUT_S_MIN = 0.001
TIMEOUT_S_MAX = 3600.0
"""As the gateway has it."""
REMAINING_HEAD = ("REQUEST", "STATE", "REASON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("instance", metavar="INSTANCE", help="its id")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--timeout",
        type=seconds(TIMEOUT_S_MIN, TIMEOUT_S_MAX),
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"wait so long until it is empty (default {TIMEOUT_S:g}); it goes on draining after that",
    )
    way.add_argument("--undo", action="store_true", help="take it back: it gets new requests again")
    add_admin_flags(parser)
    runs(parser, run, "kvferry drain a --timeout 120", "kvferry drain a --undo")


def run(flags: argparse.Namespace) -> int:
    client = admin_client(flags)
    if flags.undo:
        return take_back(client, flags.instance, as_json=flags.json)
    path = f"/admin/instances/{segment(flags.instance)}/drain"
    answer = client.ask("POST", path, {"timeout_s": flags.timeout}, flags.timeout + ANSWER_S)
    if flags.json:
        print_json(answer)
    else:
        _print(flags.instance, answer)
    return Exit.OK if answer.get("empty") else Exit.FAILED


def _print(instance_id: str, answer: dict[str, Any]) -> None:
    moved = f"{answer.get('moved')} requests have moved away"
    if answer.get("empty"):
        print_sentence(f"{instance_id} is empty, and can be stopped: {moved}.")
        return
    state = "goes on draining" if answer.get("draining") else "has been taken back"
    print_sentence(f"{instance_id} is not empty yet, and {state}: {moved}.")
    rows = [[one.get(name) for name in ("request", "state", "reason")] for one in entries(answer, "remaining")]
    if rows:
        print_table(REMAINING_HEAD, rows)
