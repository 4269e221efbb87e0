"""What a server's own metrics page says of its migrations."""

from __future__ import annotations

from prometheus_client import REGISTRY

from gateway import wire
from vllm_plugin import metrics

NAMES: tuple[str, ...] = ("migrations_out_total", "migration_out_seconds_sum", "migration_out_final_seconds_sum")
NAMES += ("migration_out_stages_sum", "migration_out_blocks_sum", "migration_out_bytes_total")


def values(outcome: str) -> list[float]:
    labels = {"migrations_out_total": {"outcome": outcome}}
    return [REGISTRY.get_sample_value(f"kvferry_{name}", labels.get(name, {})) or 0 for name in NAMES]


def added(outcome: str) -> list[float]:
    before = values(outcome)
    metrics.migrated(wire.MigrationResult("m", "r", "a", "b", outcome, None, 3, 7, 2, 5000, 9, 250.0, 8.0))
    return [round(after - one, 6) for after, one in zip(values(outcome), before, strict=True)]


def test_a_migration_is_counted_and_its_cost_only_when_it_came_about() -> None:
    assert added("committed") == [1, 0.25, 0.008, 3, 7, 5000]
    assert added("aborted") == [1, 0, 0, 0, 0, 0]
