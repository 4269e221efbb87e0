"""``kvferry migrate``: moves one request now, and says what its client saw."""

from __future__ import annotations

import argparse
from typing import Any

from gateway.cli.arguments import add_admin_flags, runs
from gateway.cli.client import admin_client
from gateway.cli.exits import Exit
from gateway.cli.output import print_json, print_sentence
from gateway.wire import MIGRATION_METHODS

ANSWER_S = 600.0
"""Longer than any migration takes: the gateway gives up before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST", help="its id, or that of its reply (chatcmpl-...)")
    parser.add_argument("destination", metavar="DESTINATION", help="id of the instance that it should go to")
    parser.add_argument(
        "--method",
        choices=MIGRATION_METHODS,
        default="live",
        help="live (the default); blocking: stop, copy all, go on; recompute: copy nothing",
    )
    add_admin_flags(parser)
    runs(parser, run, "kvferry migrate 6f1c0a9e b")


def run(flags: argparse.Namespace) -> int:
    order = {"request": flags.request, "destination": flags.destination, "method": flags.method}
    result = admin_client(flags).ask("POST", "/admin/migrate", order, ANSWER_S)
    if flags.json:
        print_json(result)
    else:
        print_sentence(_sentence(result))
    return Exit.OK if result.get("outcome") == "committed" else Exit.FAILED


def _sentence(result: dict[str, Any]) -> str:
    request, source, destination = (result.get(name) for name in ("request_id", "source_id", "destination_id"))
    if result.get("outcome") != "committed":
        return f"{request} stays on {source}: {result.get('reason') or result.get('outcome')}."
    blocks, reused, stages = (result.get(name) for name in ("blocks_sent", "blocks_reused", "stages"))
    said = f"{request} has moved from {source} to {destination}: {blocks} blocks sent in {stages} stages"
    said += f", {reused} there already, {result.get('duration_ms') or 0:.0f} ms."
    if result.get("pause_ms") is not None:
        said += f" Its client saw a pause of {result['pause_ms']:.1f} ms"
        if result.get("token_gap_ms") is not None:
            said += f", beside a usual gap of {result['token_gap_ms']:.1f} ms between tokens"
        said += "."
    return said
