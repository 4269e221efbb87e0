"""``kvferry requests``: what runs, what has just ended, one of them with its moves, and an end to it."""

from __future__ import annotations

import argparse
from typing import Any

from gateway.cli.arguments import add_action, add_actions, add_admin_flags, runs
from gateway.cli.client import admin_client, segment
from gateway.cli.exits import Exit
from gateway.cli.output import entries, print_json, print_sentence, print_table

HEAD = ("REQUEST", "STATE", "INSTANCE", "GATEWAY", "MODEL", "PATH", "TOKENS", "MOVES")
MOVES_HEAD = ("MOVE", "KIND", "FROM", "TO", "TOKENS", "PAUSE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    listed = add_action(actions, "list", "list the running requests (what `kvferry requests` alone does)")
    listed.add_argument("--recent", action="store_true", help="those that ended lately too")
    add_admin_flags(listed)
    runs(listed, list_requests, "kvferry requests", "kvferry requests --recent --json")
    one = add_action(actions, "show", "show one request with its moves")
    one.add_argument("request", metavar="REQUEST", help="its id, or that of its reply (chatcmpl-...)")
    add_admin_flags(one)
    runs(one, show_request, "kvferry requests show 6f1c0a9e")
    cancelled = add_action(actions, "cancel", "end a running request with an error to its client")
    cancelled.add_argument("request", metavar="REQUEST", help="its id, or that of its reply (chatcmpl-...)")
    add_admin_flags(cancelled)
    runs(cancelled, cancel_request, "kvferry requests cancel 6f1c0a9e")


def list_requests(flags: argparse.Namespace) -> int:
    """Those of all gateways, whichever is asked."""
    answer = admin_client(flags).get("/admin/requests")
    running, recent = entries(answer, "requests"), entries(answer, "recent")
    if flags.json:
        complete = {"complete": bool(answer.get("complete"))}
        print_json({"requests": running, **({"recent": recent} if flags.recent else {}), **complete})
        return Exit.OK
    print_table(HEAD, [_row(one) for one in [*running, *(recent if flags.recent else [])]])
    if not answer.get("complete"):
        print_sentence("Not all gateways have answered with all that they have.")
    return Exit.OK


def show_request(flags: argparse.Namespace) -> int:
    found = admin_client(flags).get(f"/admin/requests/{segment(flags.request)}")
    if flags.json:
        print_json(found)
        return Exit.OK
    print_table(HEAD, [_row(found)])
    if moves := entries(found, "moves"):
        print()
        print_table(MOVES_HEAD, [_move_row(move) for move in moves])
    return Exit.OK


def cancel_request(flags: argparse.Namespace) -> int:
    answer = admin_client(flags).ask("DELETE", f"/admin/requests/{segment(flags.request)}")
    if flags.json:
        print_json(answer)
    else:
        print_sentence(f"{answer.get('request')} is cancelled: its client is told so.")
    return Exit.OK


def _row(one: dict[str, Any]) -> list[object]:
    columns = [one.get(name) for name in ("id", "state", "instance", "gateway", "model", "path", "output_tokens")]
    return [*columns, len(one.get("moves") or [])]


def _move_row(move: dict[str, Any]) -> list[object]:
    columns = [move.get(name) for name in ("migration_id", "kind", "source", "destination", "output_tokens")]
    pause_ms = move.get("pause_ms")
    return [*columns, None if pause_ms is None else f"{pause_ms:.1f} ms"]
