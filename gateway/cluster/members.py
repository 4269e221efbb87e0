"""The instances and what they last said about themselves; where :class:`ClusterView` comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway import wire
from gateway.policy.view import ClusterView, InstanceView, ModelGroup, unknown_load


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of one vLLM server: a restart has another ``boot_id``, and nothing of the old one holds for it."""

    instance_id: str
    url: str
    boot_id: str


@dataclass(slots=True)
class Member:
    instance: Instance
    model_cards: tuple[dict[str, Any], ...] = ()
    """As the instance's own ``/v1/models`` has them."""
    healthy: bool = True
    reason: str | None = None
    """Why it is not healthy."""
    report: wire.Report | None = None
    reported_at: float = -math.inf
    """This process's monotonic clock. The instance's clock is never asked."""
    heard_at: float = -math.inf
    """When its API server last answered; its reports need the engine too, which may be in a long step."""
    engine_dead: bool = False
    """It says so itself."""
    drain_ordered: bool = False
    """By this gateway, just now: from the first report on that knows of it, the reports are right."""

    @property
    def draining(self) -> bool:
        return self.drain_ordered or (self.report is not None and self.report.draining)

    @property
    def models(self) -> frozenset[str]:
        return frozenset(card["id"] for card in self.model_cards)

    @property
    def groups(self) -> frozenset[ModelGroup]:
        return frozenset(_group(card) for card in self.model_cards)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a reply may be silent, by what is known of its instance. Seconds."""

    told_s: float
    """Known to be lost: only as long as what it has sent before may still be on its way."""
    hang_s: float
    """Nothing of the instance is heard."""
    engine_s: float
    """Its API server is heard, its engine is not."""


class Members:
    """``now`` is this process's monotonic clock in seconds, everywhere."""

    def __init__(self, report_stale_s: float) -> None:
        self._report_stale_s = report_stale_s
        self._by_id: dict[str, Member] = {}

    def get(self, instance_id: str) -> Instance | None:
        member = self._by_id.get(instance_id)
        return member.instance if member is not None else None

    def all(self) -> list[Member]:
        return [self._by_id[instance_id] for instance_id in sorted(self._by_id)]

    def probed(
        self, instance: Instance, model_cards: Sequence[dict[str, Any]], healthy: bool, reason: str | None
    ) -> None:
        member = self._by_id.get(instance.instance_id)
        if member is None or member.instance != instance:
            member = self._by_id[instance.instance_id] = Member(instance)
        member.model_cards = _steady(member.model_cards, model_cards)
        member.healthy, member.reason = healthy, reason

    def lost(self, url: str, reason: str) -> None:
        """A probe failed: the instance stays known, with its models, but nothing is sent there."""
        for member in self._by_id.values():
            if member.instance.url == url:
                member.healthy, member.reason = False, reason

    def forget(self, url: str, keep: str) -> None:
        """Another instance answers under this URL now."""
        for instance_id in [one for one, member in self._by_id.items() if member.instance.url == url and one != keep]:
            del self._by_id[instance_id]

    def reported(self, report: wire.Report, now: float) -> None:
        """Ignored when it is of another life than the one that was probed, or not newer than the last."""
        member = self._by_id.get(report.instance_id)
        if member is None or member.instance.boot_id != report.boot_id:
            return
        if member.report is None or report.sequence > member.report.sequence:
            member.report, member.reported_at = report, now
            member.drain_ordered &= not report.draining

    def heard(self, url: str, engine_dead: bool, now: float) -> None:
        """Its API server has answered, if only that its engine is dead."""
        for member in self._by_id.values():
            if member.instance.url == url:
                member.heard_at, member.engine_dead = now, engine_dead
        if engine_dead:
            self.lost(url, "its engine is dead")

    def is_draining(self, instance_id: str) -> bool:
        member = self._by_id.get(instance_id)
        return member is not None and member.draining

    def drain_ordered(self, instance_id: str, draining: bool) -> None:
        """Nothing is sent there from now on, not only from its next report on."""
        if instance_id in self._by_id:
            self._by_id[instance_id].drain_ordered = draining

    def why_gone(self, instance: Instance, silent_s: float, patience: Patience, now: float) -> str | None:
        """Why a reply of ``instance``, silent for so long, will not come; ``None`` if it may. A long prefill is silent
        too, but then the API server answers ``/health``, and the engine reports between two steps."""
        member = self._by_id.get(instance.instance_id)
        if member is None or member.instance != instance:
            return "has been restarted" if silent_s >= patience.told_s else None
        if member.engine_dead:
            return "says that its engine is dead" if silent_s >= patience.told_s else None
        if min(silent_s, now - max(member.heard_at, member.reported_at)) >= patience.hang_s:
            return "does not answer"
        if min(silent_s, now - member.reported_at) >= patience.engine_s:
            return "has an engine that does nothing"
        return None

    def is_stale(self, member: Member, now: float) -> bool:
        return now - member.reported_at > self._report_stale_s

    def healthy_count(self) -> int:
        return sum(member.healthy for member in self._by_id.values())

    def knows_model(self, model: str) -> bool:
        return any(model in member.models for member in self._by_id.values())

    def group(self, instance_id: str, model: str | None) -> ModelGroup | None:
        """What ``model`` stands for at that instance; without a name, its default: the first base model."""
        member = self._by_id.get(instance_id)
        groups = [] if member is None else [_group(card) for card in member.model_cards]
        named = [group for group in groups if (group.name == model if model is not None else group.parent is None)]
        return named[0] if named else None

    def serves(self, instance_id: str, group: ModelGroup) -> bool:
        member = self._by_id.get(instance_id)
        return member is not None and group in member.groups

    def is_healthy(self, instance_id: str) -> bool:
        member = self._by_id.get(instance_id)
        return member is not None and member.healthy

    def model_cards(self) -> list[dict[str, Any]]:
        """The union, by model id; of several cards that of the smallest instance id. Always in the same order."""
        cards: dict[str, dict[str, Any]] = {}
        for member in self.all():
            for card in member.model_cards:
                cards.setdefault(card["id"], card)
        return [cards[model] for model in sorted(cards)]

    def view(self, now: float) -> ClusterView:
        return ClusterView(tuple(_view(member, self.is_stale(member, now)) for member in self.all()))


def _view(member: Member, stale: bool) -> InstanceView:
    report = member.report
    if report is None:
        return unknown_load(member.instance.instance_id, member.groups, member.healthy)
    return InstanceView(
        instance_id=member.instance.instance_id,
        groups=member.groups,
        healthy=member.healthy,
        stale=stale,
        draining=member.draining,
        kv_format=report.kv_format,
        block_size=max(report.block_size, 1),
        blocks_total=report.blocks_total,
        virtual_usage_blocks=(
            math.inf if member.draining or report.virtual_usage_blocks is None else report.virtual_usage_blocks
        ),
        head_of_line_blocks=report.head_of_line_blocks,
        queued_blocks=report.queued_blocks,
        requests_running=report.requests_running,
        requests_waiting=report.requests_waiting,
        freeness_steps=-math.inf if member.draining or report.freeness_steps is None else report.freeness_steps,
    )


def _group(card: dict[str, Any]) -> ModelGroup:
    root, parent = (card[name] if isinstance(card.get(name), str) else None for name in ("root", "parent"))
    return ModelGroup(card["id"], root, parent)


def _steady(known: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """vLLM makes ``created`` and the permission's id anew for each reply: a model's first card is kept."""
    by_id = {card["id"]: card for card in known}
    return tuple(
        by_id[card["id"]] if card["id"] in by_id and _same_model(by_id[card["id"]], card) else card for card in fresh
    )


def _same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("root", "parent", "max_model_len", "owned_by"))
