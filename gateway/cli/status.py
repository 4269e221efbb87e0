"""``kvferry status``: gateways, leader and instances at a glance, once or again and again."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from gateway.cli.arguments import add_admin_flags, runs, seconds
from gateway.cli.client import AdminClient, admin_client
from gateway.cli.exits import CommandFailed, Exit
from gateway.cli.instances import instance, version
from gateway.cli.output import entries, print_json, table

GATEWAY_HEAD = ("GATEWAY", "URL", "LEADS")
HEAD = ("INSTANCE", "STATE", "FREENESS", "RUNNING", "WAITING", "BLOCKS", "STEP", "VERSION")
WATCH_S = 2.0
WATCH_S_MIN = 0.1
WATCH_S_MAX = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds(WATCH_S_MIN, WATCH_S_MAX),
        const=WATCH_S,
        metavar="SECONDS",
        help=f"look again every so many seconds (default {WATCH_S:g}) until Ctrl-C; with --json, one line a look",
    )
    add_admin_flags(parser)
    runs(parser, run, "kvferry status --watch", "kvferry status --url http://10.0.0.1:8000,http://10.0.0.2:8000 --json")


def run(flags: argparse.Namespace) -> int:
    client = admin_client(flags)
    if flags.watch is not None:
        return _watch(client, flags.watch, as_json=flags.json)
    seen = look(client)
    if flags.json:
        print_json(seen)
    else:
        print(text(seen))
    return Exit.OK


def look(client: AdminClient) -> dict[str, Any]:
    """Instances as the leader sees them, or the first gateway that answers; and all gateways that those know of, also
    by other addresses than those that were given. Its keys are what --json promises."""
    gateways: list[dict[str, Any]] = []
    views: list[dict[str, Any]] = []
    failures: list[CommandFailed] = []
    for url, answer in client.get_each("/admin/instances"):
        if isinstance(answer, CommandFailed):
            failures.append(answer)
            gateways.append({"id": None, "url": url, "leading": False, "error": answer.message})
            continue
        leading = bool(answer.get("leading"))
        views.insert(0 if leading else len(views), answer)
        gateways.append({"id": answer.get("gateway"), "url": url, "leading": leading, "error": None})
    if not views:
        raise CommandFailed(failures[0].status, " ".join(failure.message for failure in failures))
    gateways += _known(views, {one["id"] for one in gateways})
    return {
        "leader": next((one["id"] for one in gateways if one["leading"]), None),
        "gateways": gateways,
        "instances": [instance(one) for one in entries(views[0], "instances")],
    }


def _known(views: list[dict[str, Any]], shown: set[str | None]) -> list[dict[str, Any]]:
    """Gateways of which the others tell: workers behind the same port, and replicas whose address was not given. One
    that several have asked in vain has not answered; one that has answered one of them has."""
    known: dict[str, dict[str, Any]] = {}
    for one in (one for view in views for one in (entries(view, "gateways") if "gateways" in view else ())):
        gateway_id = one.get("id")
        if isinstance(gateway_id, str) and gateway_id not in shown:
            error = None if one.get("answered") else "has not answered the other gateways"
            entry = {"id": gateway_id, "url": None, "leading": bool(one.get("leading")), "error": error}
            if error is None or gateway_id not in known:
                known[gateway_id] = entry
    return [known[one] for one in sorted(known)]


def text(seen: dict[str, Any]) -> str:
    gateways = [[one["id"], one["url"], one["error"] or one["leading"]] for one in seen["gateways"]]
    return f"{table(GATEWAY_HEAD, gateways)}\n\n{table(HEAD, [_row(one) for one in seen['instances']])}"


def _row(one: dict[str, Any]) -> list[object]:
    blocks = None if one["blocks_total"] is None else f"{one['blocks_used']}/{one['blocks_total']}"
    step = None if one["step_ms"] is None else f"{one['step_ms']:.1f} ms"
    freeness = None if one["freeness_steps"] is None else round(one["freeness_steps"])
    running, waiting = one["requests_running"], one["requests_waiting"]
    return [one["id"], one["state"], freeness, running, waiting, blocks, step, version(one)]


def _watch(client: AdminClient, interval_s: float, *, as_json: bool) -> int:
    """A gateway that cannot be reached, or ends, may be back at the next look. A wrong key stays wrong."""
    clears = sys.stdout.isatty() and not as_json
    while True:
        try:
            seen = look(client)
            shown = "" if as_json else text(seen)
        except CommandFailed as error:
            if error.status == Exit.NOT_ALLOWED:
                raise
            seen = {"leader": None, "gateways": [], "instances": [], "error": error.message}
            shown = error.message
        if as_json:
            print_json(seen, one_line=True)
        elif clears:
            # Home, the text, and whatever is left of the last one cleared: a whole screen cleared at once flickers.
            print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown.splitlines()) + "\x1b[J", end="", flush=True)
        else:
            print(shown, end="\n\n", flush=True)
        time.sleep(interval_s)
