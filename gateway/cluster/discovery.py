"""From a list of URLs to members: which instance answers there, in which life, with which models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gateway import wire
from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Instance, Members
from gateway.cluster.plain import Lives, plain_id, read_metrics
from gateway.cluster.store import Lease, Store
from gateway.errors import (
    GatewayError,
    LlumletRefused,
    LlumletTimeout,
    LlumletUnreachable,
    NotFound,
    StoreUnavailable,
)
from gateway.telemetry import log

SPACING_S = 0.005
"""Between two probes of a round: hundreds at once would hold up every stream and decision."""
TIMEOUTS_MAX = 3
"""In a row. A status waits for the end of an engine step, and a long prefill on a slow machine takes seconds."""


class Discovery:
    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        members: Members,
        llumlets: LlumletClient,
        store: Store,
        metrics_timeout_s: float,
    ) -> None:
        """``urls``: those that are to be probed, anew for each round."""
        self._urls = urls
        self._members = members
        self._llumlets = llumlets
        self._store = store
        self._said: dict[str, str] = {}
        self._timeouts: Counter[str] = Counter()
        self._metrics_timeout_s = metrics_timeout_s
        self._lives = Lives()
        self._never_sleeps: dict[str, Instance] = {}
        """By URL: the life of a server that has no such route."""

    async def probe_all(self) -> None:
        """One round. One that hangs delays none of the others."""
        urls = self._urls()
        await asyncio.gather(*(self._probe(url, number * SPACING_S) for number, url in enumerate(urls)))
        self._forget_all_but(self._urls())

    async def publish(self, lease: Lease) -> None:
        """The registry in Redis is for other tools to read: its loss is no loss to this gateway."""
        try:
            await self._store.register(lease, {member["id"]: member for member in self.registry()})
        except StoreUnavailable:
            self._say("registry", "store_unavailable")
        else:
            self._say("registry", "published")

    def state(self, url: str) -> str | None:
        """What the last probe that brought something new has found there."""
        return self._said.get(url)

    def registry(self) -> list[dict[str, Any]]:
        return [
            {
                "id": member.instance.instance_id,
                "url": member.instance.url,
                "boot_id": member.instance.boot_id,
                "models": sorted(member.models),
                "healthy": member.usable,
                "plugin": None if member.report is None else member.report.plugin_version,
            }
            for member in self._members.all()
        ]

    async def _probe(self, url: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await self._probe_once(url)
        except LlumletTimeout:
            self._timeouts[url] += 1
            if self._timeouts[url] >= TIMEOUTS_MAX:
                self._members.lost(url, "no answer in time")
                self._say(url, "unhealthy: no answer in time")
            return
        except GatewayError as error:
            self._members.lost(url, error.message)
            self._say(url, f"unhealthy {error.message}")
            return
        self._timeouts[url] = 0

    async def _probe_once(self, url: str) -> None:
        if self._members.has_plugin(url) or await self._llumlets.has_plugin(url):
            try:
                status, _, cards, is_asleep = await asyncio.gather(
                    self._llumlets.status(url),
                    self._llumlets.health(url),
                    self._llumlets.model_cards(url),
                    self._is_asleep(url),
                )
            except LlumletRefused as error:
                if error.llumlet_status != NotFound.status:
                    raise
            else:
                self._accept_managed(url, status.report, cards, is_asleep)
                return
        _, cards, started, is_asleep = await asyncio.gather(
            self._llumlets.health(url), self._llumlets.model_cards(url), self._started(url), self._is_asleep(url)
        )
        instance = Instance(plain_id(url), url, self._lives.boot_id(url, started), managed=False)
        self._accept(instance, cards, is_asleep, None)

    def _accept_managed(self, url: str, report: wire.Report, cards: list[dict[str, Any]], is_asleep: bool) -> None:
        self._lives.forget(url)
        reason = None
        if report.protocol_version != wire.PROTOCOL_VERSION:
            reason = f"protocol version {report.protocol_version}, this gateway speaks {wire.PROTOCOL_VERSION}"
        if self._accept(Instance(report.instance_id, url, report.boot_id), cards, is_asleep, reason):
            self._members.reported(report, time.monotonic())

    def _accept(self, instance: Instance, cards: list[dict[str, Any]], is_asleep: bool, reason: str | None) -> bool:
        instance_id, url = instance.instance_id, instance.url
        known = self._members.get(instance_id)
        self._members.answered(url)
        if not wire.is_identifier(instance_id):
            self._say(url, f"refused: {instance_id!r} cannot be an instance id")
            return False
        if known is not None and known.url != url and self._members.is_healthy(instance_id):
            self._say(url, f"refused: {known.url} has the instance id {instance_id} already")
            return False
        if reason is None and is_asleep:
            reason = "it is asleep"
        self._members.forget(url, keep=instance_id)
        if known is not None and known.url != url:  # It has moved: nobody answers where it was.
            self._members.forget(known.url, keep="")
        self._members.probed(instance, cards, reason is None, reason, time.monotonic())
        kind = "" if instance.managed else " without plugin"
        self._say(url, f"instance {instance_id} boot {instance.boot_id}{kind} {reason or 'healthy'}")
        return True

    def _forget_all_but(self, urls: Collection[str]) -> None:
        """What is probed no more."""
        for url in self._said.keys() - {*urls, "registry"}:
            del self._said[url]
            self._timeouts.pop(url, None)
            self._never_sleeps.pop(url, None)
            self._lives.forget(url)
            self._members.forget(url)  # A probe may have ended after its URL was given up.

    async def _started(self, url: str) -> str | None:
        """Metrics are not needed to serve: without them it is only harder to see a restart."""
        try:
            return read_metrics(await self._llumlets.metrics(url, self._metrics_timeout_s)).started
        except (LlumletRefused, LlumletUnreachable):
            return None

    async def _is_asleep(self, url: str) -> bool:
        """vLLM's sleep mode. A route that is not there is asked for once in a server's life."""
        known = self._never_sleeps.get(url)
        if known is not None and self._members.get(known.instance_id) == known:
            return False
        try:
            answer = await self._llumlets.is_sleeping(url)
        except (LlumletRefused, LlumletUnreachable):
            return False
        lives = [member.instance for member in self._members.all() if member.instance.url == url]
        if answer is None and lives:
            self._never_sleeps[url] = lives[0]
        return answer is True

    def _say(self, url: str, state: str) -> None:
        """Changes only: a dead instance is one line, not one every two seconds."""
        if self._said.get(url) != state:
            self._said[url] = state
            log("discovery", level=logging.INFO, target=url, state=state)
