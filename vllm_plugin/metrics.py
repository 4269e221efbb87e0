"""Numbers on vLLM's own ``/metrics`` page. Labels come from fixed lists, never from a client."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from gateway import wire

_STAYING = Counter(
    "kvferry_staying_requests", "Managed requests of a kind that cannot move, by reason.", labelnames=["reason"]
)
_MIGRATIONS = Counter("kvferry_migrations_out", "Migrations away from this instance, by outcome.", ["outcome"])

_TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_SECONDS = Histogram("kvferry_migration_out_seconds", "Duration of committed migrations.", buckets=_TIMES_S)
_FINAL = Histogram(
    "kvferry_migration_out_final_seconds", "Of that, from the last step here to the commit.", buckets=_TIMES_S
)
_STAGES = Histogram("kvferry_migration_out_stages", "Stages of committed migrations.", buckets=_COUNTS)
_SENT = Histogram("kvferry_migration_out_blocks", "KV blocks that they sent.", buckets=_COUNTS)
_REUSED = Counter("kvferry_migration_out_reused_blocks", "KV blocks that destinations had already.")
_BYTES = Counter("kvferry_migration_out_bytes", "Bytes of KV blocks that committed migrations sent.")


def stays(reason: str, count: int = 1) -> None:
    """Requests have begun that will stay here."""
    _STAYING.labels(reason).inc(count)


def migrated(result: wire.MigrationResult) -> None:
    _MIGRATIONS.labels(result.outcome).inc()
    if result.outcome == "committed":
        _SECONDS.observe(result.duration_ms / 1000)
        _FINAL.observe(result.final_ms / 1000)
        _STAGES.observe(result.stages)
        _SENT.observe(result.blocks_sent)
        _REUSED.inc(result.blocks_reused)
        _BYTES.inc(result.bytes_sent)
