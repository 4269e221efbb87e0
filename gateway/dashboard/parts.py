"""The events of the stream: what each says, and how often it is looked at."""

from __future__ import annotations

import time
from typing import Any

from gateway.cluster.replicas import Replicas
from gateway.dashboard.glances import Glances
from gateway.dashboard.journal import Journal
from gateway.dashboard.state import State
from gateway.dashboard.stream import Part

LOOK_S = 0.25
OTHERS_S = 1.0
"""Between two questions to the other gateways, which go through Redis."""


def build_parts(gateway_id: str, state: State, journal: Journal, glances: Glances, replicas: Replicas) -> list[Part]:
    async def cluster() -> dict[str, Any]:
        return state.look(time.monotonic())

    async def entries() -> dict[str, Any]:
        return {"gateway": gateway_id, "entries": journal.to_json()}

    async def requests() -> dict[str, Any]:
        return await glances.all(replicas)

    return [Part("cluster", LOOK_S, cluster), Part("journal", LOOK_S, entries), Part("requests", OTHERS_S, requests)]
