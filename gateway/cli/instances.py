"""``kvferry instances``, and what is shown of an instance."""

from __future__ import annotations

import argparse
from typing import Any

from gateway.cli.arguments import add_action, add_actions, add_admin_flags, runs
from gateway.cli.client import AdminClient, admin_client, segment
from gateway.cli.exits import Exit
from gateway.cli.output import entries, print_json, print_sentence, print_table

HEAD = ("INSTANCE", "STATE", "URL", "MODELS", "VERSION", "REPORT AGE", "REASON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    listed = add_action(actions, "list", "list the instances (what `kvferry instances` alone does)")
    add_admin_flags(listed)
    runs(listed, list_instances, "kvferry instances", "kvferry instances list --json")
    undrained = add_action(actions, "undrain", "take an instance back that drains, as `kvferry drain --undo` does")
    undrained.add_argument("instance", metavar="INSTANCE", help="its id")
    add_admin_flags(undrained)
    runs(undrained, undrain, "kvferry instances undrain a")


def list_instances(flags: argparse.Namespace) -> int:
    instances = [instance(one) for one in entries(admin_client(flags).get("/admin/instances"), "instances")]
    if flags.json:
        print_json({"instances": instances})
    else:
        print_table(HEAD, [_row(one) for one in instances])
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
    return [one["id"], one["state"], one["url"], ", ".join(one["models"]), version(one), age, one["reason"]]
