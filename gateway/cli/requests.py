"""``kvferry requests``: what runs, what has just ended, and one of them with its moves."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from gateway.cli.arguments import add_action, add_actions, add_admin_flags, runs
from gateway.cli.client import AdminClient, admin_client
from gateway.cli.exits import CommandFailed, Exit
from gateway.cli.output import entries, print_json, print_table

HEAD = ("REQUEST", "STATE", "INSTANCE", "MODEL", "PATH", "TOKENS", "MOVES")
MOVES_HEAD = ("MOVE", "KIND", "FROM", "TO", "TOKENS", "PAUSE")
RESPONSE_PREFIXES = ("chatcmpl-", "cmpl-")
"""What vLLM puts before the id in a reply."""


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


def list_requests(flags: argparse.Namespace) -> int:
    running, recent = _all(admin_client(flags))
    if flags.json:
        print_json({"requests": running, **({"recent": recent} if flags.recent else {})})
    else:
        print_table(HEAD, [_row(one) for one in [*running, *(recent if flags.recent else [])]])
    return Exit.OK


def show_request(flags: argparse.Namespace) -> int:
    request_id = flags.request
    for prefix in RESPONSE_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    running, recent = _all(admin_client(flags))
    found = next((one for one in [*running, *recent] if one.get("id") == request_id), None)
    if found is None:
        raise CommandFailed(Exit.FAILED, f"No request `{flags.request}` is running or has ended lately there.")
    if flags.json:
        print_json(found)
        return Exit.OK
    print_table(HEAD, [_row(found)])
    if moves := entries(found, "moves"):
        print()
        print_table(MOVES_HEAD, [_move_row(move) for move in moves])
    return Exit.OK


def _all(client: AdminClient) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Running and recent ones of every gateway that answers."""
    answers = client.get_each("/admin/requests")
    there = [answer for _, answer in answers if not isinstance(answer, CommandFailed)]
    if not there:
        failures = [answer for _, answer in answers if isinstance(answer, CommandFailed)]
        raise CommandFailed(failures[0].status, " ".join(failure.message for failure in failures))
    running = _once(one for answer in there for one in entries(answer, "requests"))
    return running, _once(one for answer in there for one in entries(answer, "recent"))


def _once(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several addresses may lead to one gateway."""
    return list({str(one.get("id")): one for one in found}.values())


def _row(one: dict[str, Any]) -> list[object]:
    columns = [one.get(name) for name in ("id", "state", "instance", "model", "path", "output_tokens")]
    return [*columns, len(one.get("moves") or [])]


def _move_row(move: dict[str, Any]) -> list[object]:
    columns = [move.get(name) for name in ("migration_id", "kind", "source", "destination", "output_tokens")]
    pause_ms = move.get("pause_ms")
    return [*columns, None if pause_ms is None else f"{pause_ms:.1f} ms"]
