"""The requests of all gateways, as few words of each as a list needs, and not more of them than a page can show."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from gateway.cluster.replicas import Replicas
from gateway.dashboard.journal import Journal, is_flat
from gateway.errors import StoreUnavailable
from gateway.serving.session import Session, Sessions

QUESTION = "glance"
"""What one gateway asks another (cluster/replicas.py)."""
SHOWN_MAX = 200
"""Of each gateway, and in all."""


class Glances:
    def __init__(self, gateway_id: str, sessions: Sessions, journal: Journal) -> None:
        self._gateway_id = gateway_id
        self._sessions = sessions
        self._journal = journal

    def own(self) -> dict[str, Any]:
        """As another gateway is told it."""
        now = time.monotonic()
        return {
            "running": self._sessions.count(),
            "requests": [_brief(session, now) for session in islice(self._sessions.all(), SHOWN_MAX)],
            "moves": self._journal.own_moves(now),
        }

    async def all(self, replicas: Replicas) -> dict[str, Any]:
        """``silent``: gateways that have not answered. Redis may be away: then these are this gateway's own."""
        others = replicas.others
        try:
            answers = await replicas.ask(others, QUESTION, {})
        except StoreUnavailable:
            answers = {}
        now = time.monotonic()
        own = self.own()
        requests = [{**one, "gateway": self._gateway_id} for one in own["requests"]]
        running, silent = own["running"], sorted(others - answers.keys())
        for gateway_id, words in answers.items():
            match words:
                case {"running": int(more), "requests": [*theirs], "moves": [*moves]}:
                    running += more
                    requests += [{**one, "gateway": gateway_id} for one in theirs[:SHOWN_MAX] if _is_brief(one)]
                    self._journal.heard(gateway_id, moves, now)
                case _:
                    silent.append(gateway_id)
        self._journal.keep(set(others))
        return {"running": running, "silent": silent, "requests": requests[:SHOWN_MAX]}


def _brief(session: Session, now: float) -> dict[str, Any]:
    return {
        "id": session.request_id,
        "model": session.body.model,
        "instance": session.instance_id,
        "output_tokens": session.tokens_sent,
        "moves": len(session.moves),
        "age_s": round(now - session.visit.started_at),
    }


def _is_brief(value: object) -> bool:
    """Another gateway may be of another version."""
    match value:
        case Mapping() if {"id", "model", "instance", "output_tokens", "moves", "age_s"} <= value.keys():
            return isinstance(value["id"], str) and is_flat(value)
        case _:
            return False
