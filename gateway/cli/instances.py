"""``kvferry instances``, and what is shown of an instance."""

from __future__ import annotations

import argparse
from typing import Any

from gateway.cli.arguments import add_action, add_actions, add_admin_flags, runs
from gateway.cli.client import AdminClient, admin_client, segment
from gateway.cli.exits import Exit
from gateway.cli.output import entries, print_json, print_sentence, print_table

HEAD = ("INSTANCE", "STATE", "URL", "SOURCE", "MODELS", "VERSION", "REPORT AGE", "REASON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    listed = add_action(actions, "list", "list the instances (what `kvferry instances` alone does)")
    add_admin_flags(listed)
    runs(listed, list_instances, "kvferry instances", "kvferry instances list --json")
    added = add_action(actions, "add", "let all gateways follow the vLLM server at a URL")
    added.add_argument("address", metavar="ADDRESS", help="its base URL, as the gateways reach it: http://host:port")
    add_admin_flags(added)
    runs(added, add, "kvferry instances add http://10.0.0.3:8001")
    removed = add_action(actions, "remove", "send nothing new to an instance, and forget it once nothing runs there")
    removed.add_argument("instance", metavar="INSTANCE", help="its id, or its base URL")
    add_admin_flags(removed)
    runs(removed, remove, "kvferry instances remove b", "kvferry instances remove http://10.0.0.3:8001")
    undrained = add_action(actions, "undrain", "take an instance back that drains, as `kvferry drain --undo` does")
    undrained.add_argument("instance", metavar="INSTANCE", help="its id")
    add_admin_flags(undrained)
    runs(undrained, undrain, "kvferry instances undrain a")


def list_instances(flags: argparse.Namespace) -> int:
    answer = admin_client(flags).get("/admin/instances")
    instances = [instance(one) for one in entries(answer, "instances")]
    known = {one["url"] for one in instances}
    silent = [one for one in entries(answer, "addresses") if one.get("url") not in known]
    if flags.json:
        print_json({"instances": instances, "addresses": entries(answer, "addresses")})
        return Exit.OK
    rows = [_row(one) for one in instances]
    rows += [[None, "unknown", one.get("url"), one.get("source"), None, None, None, one.get("state")] for one in silent]
    print_table(HEAD, rows)
    return Exit.OK


def add(flags: argparse.Namespace) -> int:
    answer = admin_client(flags).ask("POST", "/admin/instances", {"url": flags.address})
    if flags.json:
        print_json(answer)
    else:
        print_sentence(f"{answer.get('url')} is followed by all gateways from now on.")
    return Exit.OK


def remove(flags: argparse.Namespace) -> int:
    """By its URL too: an address at which nothing has ever answered has no id."""
    client = admin_client(flags)
    if "://" in flags.instance:
        answer = client.ask("DELETE", "/admin/instances", {"url": flags.instance})
    else:
        answer = client.ask("DELETE", f"/admin/instances/{segment(flags.instance)}")
    if flags.json:
        print_json(answer)
    else:
        print_sentence(f"{answer.get('url')} gets nothing new, and is forgotten once nothing runs there.")
    return Exit.OK


def undrain(flags: argparse.Namespace) -> int:
    return take_back(admin_client(flags), flags.instance, as_json=flags.json)


def take_back(client: AdminClient, instance_id: str, *, as_json: bool) -> int:
    answer = client.ask("DELETE", f"/admin/instances/{segment(instance_id)}/drain")
    if as_json:
        print_json(answer)
    else:
        print_sentence(f"{instance_id} is taken back.")
    return Exit.OK


def instance(answer: dict[str, Any]) -> dict[str, Any]:
    """From one entry of ``GET /admin/instances``. Its keys are what --json promises: docs/cli.md."""
    report = answer.get("report") or {}
    load = answer.get("load") or {}
    said = report or load
    total = said.get("blocks_total")
    return {
        "id": answer.get("id"),
        "url": answer.get("url"),
        "source": answer.get("source"),
        "state": _state(answer),
        "reason": answer.get("reason"),
        "models": answer.get("models") or [],
        "freeness_steps": report.get("freeness_steps"),
        "requests_running": said.get("requests_running"),
        "requests_waiting": said.get("requests_waiting"),
        "blocks_total": total,
        "blocks_used": _blocks_used(report, load, total),
        "step_ms": report.get("step_ms"),
        "report_age_ms": answer.get("report_age_ms"),
        "plugin_version": answer.get("plugin"),
        "vllm_version": report.get("vllm_version"),
        "boot_id": answer.get("boot_id"),
    }


def version(one: dict[str, Any]) -> str:
    if one["plugin_version"] is None:
        return "no plugin"
    return f"{one['plugin_version']} on {one['vllm_version']}"


def _state(answer: dict[str, Any]) -> str:
    """down, drained (it can be stopped), draining, stale (its reports are late) or ready."""
    if not answer.get("healthy"):
        return "down"
    if answer.get("draining"):
        return "drained" if answer.get("empty") else "draining"
    return "stale" if answer.get("stale") else "ready"


def _blocks_used(report: dict[str, Any], load: dict[str, Any], total: Any) -> int | None:
    """What is reserved for migrations counts as used."""
    if not isinstance(total, int):
        return None
    if report:
        return total - int(report.get("blocks_free", total))
    return round(total * float(load.get("kv_usage", 0.0)))


def _row(one: dict[str, Any]) -> list[object]:
    age_ms = one["report_age_ms"]
    age = None if age_ms is None else f"{age_ms / 1000:.1f} s"
    return [
        one["id"],
        one["state"],
        one["url"],
        one["source"],
        ", ".join(one["models"]),
        version(one),
        age,
        one["reason"],
    ]
