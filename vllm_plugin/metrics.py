"""Counters on vLLM's own ``/metrics`` page. Labels come from fixed lists, never from a client."""

from __future__ import annotations

from prometheus_client import Counter

_STAYING = Counter(
    "kvferry_staying_requests", "Managed requests of a kind that cannot move, by reason.", labelnames=["reason"]
)
_MIGRATIONS = Counter("kvferry_migrations_out", "Migrations away from this instance, by outcome.", ["outcome"])


def stays(reason: str, count: int = 1) -> None:
    """Requests have begun that will stay here."""
    _STAYING.labels(reason).inc(count)


def migrated(outcome: str) -> None:
    _MIGRATIONS.labels(outcome).inc()
