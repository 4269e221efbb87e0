"""From a list of URLs to members: which instance answers there, in which life, with which models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gateway import wire
from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Instance, Members
from gateway.cluster.store import Store
from gateway.errors import GatewayError, LlumletTimeout, StoreUnavailable
from gateway.telemetry import log

TIMEOUTS_MAX = 3
"""In a row. A status waits for the end of an engine step, and a long prefill on a slow machine takes seconds."""


class Discovery:
    def __init__(self, urls: Sequence[str], members: Members, llumlets: LlumletClient, store: Store) -> None:
        self._urls = tuple(urls)
        self._members = members
        self._llumlets = llumlets
        self._store = store
        self._said: dict[str, str] = {}
        self._timeouts: Counter[str] = Counter()

    async def probe_all(self) -> None:
        """One round: every URL at once, so that one that hangs delays none of the others."""
        await asyncio.gather(*(self._probe(url) for url in self._urls))

    async def publish(self) -> None:
        """The registry in Redis is for other tools to read: its loss is no loss to this gateway."""
        try:
            await self._store.register({member["id"]: member for member in self.registry()})
        except StoreUnavailable as error:
            self._say("registry", f"store_unavailable {error.message}")
        else:
            self._say("registry", "published")

    def registry(self) -> list[dict[str, Any]]:
        return [
            {
                "id": member.instance.instance_id,
                "url": member.instance.url,
                "boot_id": member.instance.boot_id,
                "models": sorted(member.models),
                "healthy": member.healthy,
            }
            for member in self._members.all()
        ]

    async def _probe(self, url: str) -> None:
        try:
            status, _, cards = await asyncio.gather(
                self._llumlets.status(url), self._llumlets.health(url), self._llumlets.model_cards(url)
            )
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
        self._accept(url, status.report, cards)

    def _accept(self, url: str, report: wire.Report, cards: list[dict[str, Any]]) -> None:
        instance = Instance(report.instance_id, url, report.boot_id)
        known = self._members.get(report.instance_id)
        if not wire.is_identifier(report.instance_id):
            self._say(url, f"refused: {report.instance_id!r} cannot be an instance id")
            return
        if known is not None and known.url != url:
            self._say(url, f"refused: {known.url} has the instance id {report.instance_id} already")
            return
        reason = None
        if report.protocol_version != wire.PROTOCOL_VERSION:
            reason = f"protocol version {report.protocol_version}, this gateway speaks {wire.PROTOCOL_VERSION}"
        self._members.forget(url, keep=report.instance_id)
        self._members.probed(instance, cards, reason is None, reason)
        self._members.reported(report, time.monotonic())
        self._say(url, f"instance {report.instance_id} boot {report.boot_id} {reason or 'healthy'}")

    def _say(self, url: str, state: str) -> None:
        """Changes only: a dead instance is one line, not one every two seconds."""
        if self._said.get(url) != state:
            self._said[url] = state
            log("discovery", level=logging.INFO, target=url, state=state)
