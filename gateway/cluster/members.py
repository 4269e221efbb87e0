"""The instances and what they last said about themselves; where :class:`ClusterView` comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway import wire
from gateway.cluster.health import Health, HealthSettings, may_eject_one
from gateway.cluster.views import Look, Views
from gateway.errors import LegError, LegUnreachable
from gateway.policy.protection import Targets, with_headroom
from gateway.policy.usage import freeness_steps
from gateway.policy.view import ClusterView, InstanceView, ModelGroup, unknown_load

NO_TARGETS: Targets = {}


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of one vLLM server: a restart has another ``boot_id``, and nothing of the old one holds for it."""

    instance_id: str
    url: str
    boot_id: str
    managed: bool = True
    """It has the plugin: only then may it be told of migrations, resumes and the cluster's secret."""


@dataclass(frozen=True, slots=True)
class PlainLoad:
    """What vLLM's own metrics say of an instance without the plugin."""

    requests_running: int
    requests_waiting: int
    kv_usage: float
    """The share of the blocks in use, from 0 to 1."""
    blocks_total: int
    block_size: int
    tokens: float | None
    """All that it has computed so far, prompts included: it grows while the engine works."""

    @property
    def claims_work(self) -> bool:
        return self.requests_running > 0 or self.requests_waiting > 0 or self.kv_usage > 0


@dataclass(slots=True)
class Member:
    instance: Instance
    model_cards: tuple[dict[str, Any], ...] = ()
    """As the instance's own ``/v1/models`` has them."""
    models: frozenset[str] = frozenset()
    groups: frozenset[ModelGroup] = frozenset()
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
    leaving: bool = False
    """Its address is wanted no more (targets.py)."""
    load: PlainLoad | None = None
    """Instead of a report, where there is no plugin."""
    load_at: float = -math.inf
    progressed_at: float = -math.inf
    """When its engine was last seen to work: by a token, a report or its counters."""
    health: Health = field(default_factory=Health)

    @property
    def usable(self) -> bool:
        """As far as its health goes."""
        return self.healthy and self.health.ejected_why is None

    @property
    def heard_of_at(self) -> float:
        return max(self.heard_at, self.reported_at, self.progressed_at)

    @property
    def known_at(self) -> float:
        """How old what is known of its load is."""
        return self.reported_at if self.instance.managed else self.load_at

    @property
    def queue_stands(self) -> bool:
        """Requests wait, and none runs."""
        said = self.report if self.instance.managed else self.load
        return said is not None and said.requests_waiting > 0 and said.requests_running == 0

    @property
    def draining(self) -> bool:
        return self.leaving or self.drain_ordered or (self.report is not None and self.report.draining)

    def take_cards(self, fresh: Sequence[dict[str, Any]]) -> None:
        self.model_cards = _steady(self.model_cards, fresh)
        self.models = frozenset(card["id"] for card in self.model_cards)
        self.groups = frozenset(_group(card) for card in self.model_cards)


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

    def __init__(
        self,
        report_stale_s: float,
        unheard_s: float = 5.0,
        health: HealthSettings | None = None,
        targets: Targets = NO_TARGETS,
    ) -> None:
        """``targets``: of the classes with headroom, which is added to what instances report."""
        self._targets = targets
        self._report_stale_s = report_stale_s
        self._unheard_s = unheard_s
        self._health = health or HealthSettings()
        self._by_id: dict[str, Member] = {}
        self._in_order: tuple[Member, ...] | None = ()
        self._ids_at: dict[str, set[str]] = {}
        """By URL: with hundreds of instances, each is asked for many times a second."""
        self._views = Views(self._look)
        self._leaving: set[str] = set()
        """URLs."""
        self._answered: set[str] = set()
        """URLs."""
        self.on_report: Callable[[], None] = _nobody
        """Called after each report: who waits for room looks again."""

    def get(self, instance_id: str) -> Instance | None:
        member = self._by_id.get(instance_id)
        return member.instance if member is not None else None

    def all(self) -> tuple[Member, ...]:
        if self._in_order is None:
            self._in_order = tuple(self._by_id[instance_id] for instance_id in sorted(self._by_id))
        return self._in_order

    def has_plugin(self, url: str) -> bool | None:
        """``None`` while nothing is known of that URL."""
        kinds = [member.instance.managed for member in self._at(url)]
        return any(kinds) if kinds else None

    def probed(
        self, instance: Instance, model_cards: Sequence[dict[str, Any]], healthy: bool, reason: str | None, now: float
    ) -> None:
        """It has answered all that was asked. Once lost, an instance is believed after several good probes only."""
        member = self._by_id.get(instance.instance_id)
        is_new = member is None or member.instance != instance
        if member is None or is_new:
            member = self._put(Member(instance, leaving=instance.url in self._leaving))
        member.take_cards(model_cards)
        member.heard_at = max(member.heard_at, now)
        if not healthy:
            member.health.probed_badly()
            member.healthy, member.reason = False, reason
        elif member.health.probed_well(now, self._health) or is_new:
            member.healthy, member.reason = True, None
        self._views.changed(instance.instance_id)

    def lost(self, url: str, reason: str) -> None:
        """A probe failed: the instance stays known, with its models, but nothing is sent there."""
        for member in self._at(url):
            member.healthy, member.reason = False, reason
            member.health.probed_badly()
            self._views.changed(member.instance.instance_id)

    def leg_worked(self, instance: Instance) -> None:
        member = self._living(instance)
        if member is not None:
            member.health.worked()

    def leg_lost(self, instance: Instance, error: LegError, now: float) -> None:
        if error.instance_at_fault:
            refused = isinstance(error, LegUnreachable) and error.is_refused
            self.leg_failed(instance, error.message, refused, now)

    def leg_failed(self, instance: Instance, why: str, refused: bool, now: float) -> None:
        """``refused``: nobody listens there, which is a fact. Anything else is a suspicion, and may be the request's
        own fault: only several in a row count, and never against too many instances at once."""
        member = self._living(instance)
        if member is None:
            return
        if refused:
            self.lost(instance.url, why)
        elif member.health.failed(self._health):
            self._eject(member, why, now)

    def progressed(self, instance: Instance, at: float) -> None:
        """A token has come from there."""
        member = self._living(instance)
        if member is not None:
            member.progressed_at = max(member.progressed_at, at)
            self._views.changed(instance.instance_id)

    def silent(self, instance: Instance, silent_s: float, now: float) -> None:
        """A reply of ``instance`` has been waited for in vain for so long."""
        member = self._living(instance)
        if member is not None and min(silent_s, now - member.progressed_at) >= self._health.stall_s:
            self._eject(member, "its engine makes no progress", now)

    def loaded(self, url: str, load: PlainLoad, now: float) -> None:
        """Metrics of an instance without the plugin."""
        for member in self._at(url):
            if not member.instance.managed:
                if member.load is None or load.tokens != member.load.tokens:
                    member.progressed_at = max(member.progressed_at, now)
                member.load, member.load_at = load, now
                member.heard_at = max(member.heard_at, now)
                self._views.changed(member.instance.instance_id)

    def _living(self, instance: Instance) -> Member | None:
        member = self._by_id.get(instance.instance_id)
        return member if member is not None and member.instance == instance else None

    def _eject(self, member: Member, why: str, now: float) -> None:
        if not member.usable:
            return
        for model in member.models or {None}:
            group = [
                one.health
                for one in self._by_id.values()
                if one.healthy and not one.draining and (model is None or model in one.models)
            ]
            if not may_eject_one(group, self._health):
                return
        member.health.eject(why, now, self._health)
        self._views.changed(member.instance.instance_id)

    def leave(self, url: str, *, leaving: bool) -> None:
        """Nothing new is sent there, whichever instance answers there from now on; or it is again."""
        (self._leaving.add if leaving else self._leaving.discard)(url)
        for member in self._at(url):
            if member.leaving != leaving:
                member.leaving = leaving
                self._views.changed(member.instance.instance_id)

    def answered(self, url: str) -> None:
        """It has said who it is and what it serves, whether that is of use or not."""
        self._answered.add(url)

    def has_answered(self, url: str) -> bool:
        """At any time since it is wanted."""
        return url in self._answered

    def ids_at(self, url: str) -> list[str]:
        return sorted(self._ids_at.get(url, ()))

    def is_heard(self, url: str, now: float) -> bool:
        """Whether it has given any sign of life just now."""
        return any(now - self._by_id[one].heard_of_at <= self._unheard_s for one in self.ids_at(url))

    def forget(self, url: str, keep: str | None = None) -> None:
        """Another instance answers under this URL now, or the URL is wanted no more."""
        if keep is None:
            self._leaving.discard(url)
            self._answered.discard(url)
        for instance_id in self.ids_at(url):
            if instance_id != keep:
                self._remove(instance_id)

    def reported(self, report: wire.Report, now: float) -> None:
        """Ignored when it is of another life than the one that was probed, or not newer than the last."""
        member = self._by_id.get(report.instance_id)
        if member is None or member.instance.boot_id != report.boot_id:
            return
        if member.report is None or report.sequence > member.report.sequence:
            member.report, member.reported_at = report, now
            if not member.queue_stands:
                member.progressed_at = max(member.progressed_at, now)
            member.drain_ordered &= not report.draining
            self._views.changed(report.instance_id)
            self.on_report()

    def heard(self, url: str, engine_dead: bool, now: float) -> None:
        """Its API server has answered, if only that its engine is dead."""
        for member in self._at(url):
            member.heard_at, member.engine_dead = max(member.heard_at, now), engine_dead
            self._views.changed(member.instance.instance_id)
        if engine_dead:
            self.lost(url, "its engine is dead")

    def is_draining(self, instance_id: str) -> bool:
        member = self._by_id.get(instance_id)
        return member is not None and member.draining

    def drain_ordered(self, instance_id: str, draining: bool) -> None:
        """Nothing is sent there from now on, not only from its next report on."""
        if instance_id in self._by_id:
            self._by_id[instance_id].drain_ordered = draining
            self._views.changed(instance_id)

    def why_gone(self, instance: Instance, silent_s: float, patience: Patience, now: float) -> str | None:
        """Why a reply of ``instance``, silent for so long, will not come; ``None`` if it may. A long prefill is silent
        too, but then the API server answers ``/health``, and the engine reports between two steps."""
        member = self._by_id.get(instance.instance_id)
        if member is None or member.instance != instance:
            return "has been restarted" if silent_s >= patience.told_s else None
        if member.engine_dead:
            return "says that its engine is dead" if silent_s >= patience.told_s else None
        if min(silent_s, now - member.heard_of_at) >= patience.hang_s:
            return "does not answer"
        if member.queue_stands and min(silent_s, now - member.progressed_at) >= self._health.stall_s:
            return "has a queue that does not move"
        # Without the plugin there is no telling a long prefill from an engine that hangs.
        if instance.managed and min(silent_s, now - member.reported_at) >= patience.engine_s:
            return "has an engine that does nothing"
        return None

    def is_stale(self, member: Member, now: float) -> bool:
        """Nothing is heard of it. Without the plugin there are no reports, and it may be served all the same."""
        is_silent = now - member.heard_of_at > self._unheard_s
        return is_silent or (member.instance.managed and now - member.reported_at > self._report_stale_s)

    def knows_load(self, member: Member, now: float) -> bool:
        """Values that are old, or that claim work while the engine's counters stand still, tell nothing any more."""
        if member.instance.managed:
            return member.report is not None
        if member.load is None or now - member.load_at > self._report_stale_s:
            return False
        stands = member.load.tokens is not None and now - member.progressed_at > self._report_stale_s
        return not (member.load.claims_work and stands)

    def healthy_count(self) -> int:
        return sum(member.usable for member in self._by_id.values())

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

    def reported_at(self, instance_id: str) -> float:
        member = self._by_id.get(instance_id)
        return member.reported_at if member is not None else -math.inf

    def known_at(self, instance_id: str) -> float:
        """How old what is known of its load is."""
        member = self._by_id.get(instance_id)
        return member.known_at if member is not None else -math.inf

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
        return self._views.all(now)

    def view_of(self, instance_id: str) -> InstanceView | None:
        """As of the last refresh."""
        return self._views.get(instance_id)

    def follow(self) -> set[str]:
        """Ids of instances whose view has changed, time's changes once :meth:`refresh` has seen them: see ``Views``."""
        return self._views.follow()

    def refresh(self, now: float) -> None:
        self._views.refresh(now)

    def _look(self, instance_id: str, now: float) -> Look | None:
        member = self._by_id.get(instance_id)
        return None if member is None else (self._view(member, now), self._holds_until(member, now))

    def _view(self, member: Member, now: float) -> InstanceView:
        stale = self.is_stale(member, now)
        if member.instance.managed:
            return _view(member, stale, self._targets)
        return _plain_view(member, stale, self.knows_load(member, now))

    def _holds_until(self, member: Member, now: float) -> float:
        """When the first of what :meth:`is_stale` and :meth:`knows_load` compare with ``now`` is too old, of those that
        are not yet."""
        ages = [(member.heard_of_at, self._unheard_s), (member.known_at, self._report_stale_s)]
        if not member.instance.managed:
            ages.append((member.progressed_at, self._report_stale_s))
        return min((max(at + lasts_s, now) for at, lasts_s in ages if now - at <= lasts_s), default=math.inf)

    def _at(self, url: str) -> list[Member]:
        return [self._by_id[instance_id] for instance_id in self._ids_at.get(url, ())]

    def _put(self, member: Member) -> Member:
        instance = member.instance
        self._remove(instance.instance_id)
        self._by_id[instance.instance_id], self._in_order = member, None
        self._ids_at.setdefault(instance.url, set()).add(instance.instance_id)
        return member

    def _remove(self, instance_id: str) -> None:
        member = self._by_id.pop(instance_id, None)
        if member is None:
            return
        self._in_order = None
        ids = self._ids_at[member.instance.url]
        ids.discard(instance_id)
        if not ids:
            del self._ids_at[member.instance.url]
        self._views.changed(instance_id)


def _nobody() -> None:
    pass


def _plain_view(member: Member, stale: bool, load_known: bool) -> InstanceView:
    """In the terms of a report. The demand of the waiting ones is a guess: each as large as a running one."""
    view = dataclasses.replace(
        unknown_load(member.instance.instance_id, member.groups, member.usable),
        stale=stale,
        draining=member.draining,
        managed=False,
        load_known=load_known,
    )
    load = member.load
    if load is None or not load_known:
        return view
    used = load.kv_usage * load.blocks_total
    queued = load.requests_waiting * max(1, round(used / max(load.requests_running, 1)))
    batch = load.requests_running + load.requests_waiting
    return dataclasses.replace(
        view,
        block_size=load.block_size,
        blocks_total=load.blocks_total,
        virtual_usage_blocks=used,
        queued_blocks=queued,
        requests_running=load.requests_running,
        requests_waiting=load.requests_waiting,
        freeness_steps=freeness_steps(load.blocks_total, used, batch, load.block_size),
    )


def _view(member: Member, stale: bool, targets: Targets) -> InstanceView:
    report = member.report
    if report is None:
        return unknown_load(member.instance.instance_id, member.groups, member.usable)
    view = InstanceView(
        instance_id=member.instance.instance_id,
        groups=member.groups,
        healthy=member.usable,
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
        requests_running_max=report.requests_running_max,
        room_blocks=report.room_blocks,
        room_places=report.room_places,
        blocks_used=max(0, report.blocks_total - report.blocks_free - report.blocks_reserved),
    )
    return with_headroom(view, [one for one in targets if report.runs(one)], targets) if targets else view


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
