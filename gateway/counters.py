"""Every number that the gateway counts by itself: plain integers, made on the spot, read when somebody asks.

Counting costs no more than an addition; what Prometheus wants of it is built from here (metrics.py), and so is what the
operators' routes show. Names and labels are fixed below: nothing that a client chooses becomes a series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OTHER = "other"
"""Stands for every model that no instance serves, and for every path that is no route."""

_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_WHOLE_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_COUNTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
_TICKS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DECISIONS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
_BYTES = tuple(4.0**power * 1024 for power in range(12))


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name. With ``bounds`` they are distributions, else counts."""

    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


FAMILIES = {
    "requests": Family("Requests that have ended.", ("route", "model", "outcome")),
    "errors": Family("Failures that a client was told of, by kind; those that vLLM words itself too.", ("kind",)),
    "internal_errors": Family("Requests that failed of a bug in the gateway."),
    "output_tokens": Family("Tokens that clients have been sent.", ("model",)),
    "time_to_first_event_seconds": Family(
        "From a request's arrival to the first event of its stream.", ("model",), _FIRST_S
    ),
    "event_gap_seconds": Family("Time between two events of a stream, moves left out.", ("model",), _GAPS_S),
    "request_duration_seconds": Family(
        "From a request's arrival to its end, of those that were answered with 2xx.", ("route", "model"), _WHOLE_S
    ),
    "legs": Family("Requests to instances, by what for.", ("instance_id", "kind")),
    "legs_lost": Family("Of those, the lost ones, by why.", ("kind",)),
    "requests_restarted": Family("Times that a request began again, before its client had been sent anything."),
    "requests_resumed": Family("Times that a request went on elsewhere from its tokens, after a loss."),
    "requests_migrated": Family("Times that a request went on elsewhere because its source moved it."),
    "migrations_withdrawn": Family("Migrations that a source announced in a stream and then gave up."),
    "move_pause_seconds": Family("From the last event before a move to the first one after it.", ("kind",), _GAPS_S),
    "ordered_migrations": Family("Migrations that this gateway ordered, by how they ended.", ("method", "outcome")),
    "ordered_migration_seconds": Family("How long they took.", ("method",), _WHOLE_S),
    "ordered_migration_final_seconds": Family(
        "Of that, from the source's last step to the acknowledged commit.", ("method",), _GAPS_S
    ),
    "ordered_migration_stages": Family("Their stages.", ("method",), _COUNTS),
    "ordered_migration_blocks": Family("The KV blocks that they sent.", ("method",), _COUNTS),
    "ordered_migration_bytes": Family("The bytes that they sent.", ("method",), _BYTES),
    "drain_moves": Family("Requests moved away from draining instances."),
    "leader_actions": Family("What the leader has decided; a renewal is none.", ("action",)),
    "actions_failed": Family("Actions of the leader that an instance refused or did not answer."),
    "leader_tick_seconds": Family("One round of the leader.", (), _TICKS_S),
    "leader_work_seconds": Family(
        "Of that, what waits for no instance: to decide, and to write the snapshot.", (), _TICKS_S
    ),
    "decision_seconds": Family(
        "Of a request's arrival: to find the instance where it starts at once.", (), _DECISIONS_S
    ),
    "loop_failures": Family("Rounds of a background loop that failed of a bug.", ("loop",)),
    "report_streams_lost": Family("Connections for an instance's reports that ended."),
    "requests_waited": Family("Requests that waited because no instance was usable, or none had room."),
    "wait_seconds": Family(
        "From a request's arrival to its start, of those that waited for room.", ("priority",), _FIRST_S
    ),
    "busy_answers": Family(
        "Times that an instance did not let a request in that was to start there.", ("instance_id",)
    ),
    "waiting_looks": Family("Times that Redis was asked who of those that wait comes first."),
    "clients_stuck": Family("Clients whose connection was cut because they had stopped reading."),
    "limits_refused": Family("Requests that a key's limits refused, by which limit.", ("limit",)),
    "limits_applied_alone": Family("Requests decided by this gateway's own count, because Redis did not answer."),
    "stored_responses_dropped": Family("Stored responses of which Redis could not be told who holds them."),
    "records_dropped": Family("Records of ownership that were too many to keep while Redis was away."),
}
"""By name, less the prefix ``kvferry_`` and a count's ``_total``."""


class Distribution:
    """Counts by upper bound, the last one without."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


Labels = tuple[str, ...]
"""Values, in the order of the family's names."""


class Counters:
    """Of one gateway."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Labels, int]] = {}
        self._distributions: dict[str, dict[Labels, Distribution]] = {}

    def add(self, name: str, count: int = 1, **labels: str) -> None:
        series = self._counts.setdefault(name, {})
        key = _key(name, labels)
        series[key] = series.get(key, 0) + count

    def distribution(self, name: str, **labels: str) -> Distribution:
        """To be kept by whoever observes often."""
        series = self._distributions.setdefault(name, {})
        key = _key(name, labels)
        if key not in series:
            series[key] = Distribution(FAMILIES[name].bounds)
        return series[key]

    def get(self, name: str, **labels: str) -> int:
        """The sum of all series that have these labels."""
        names = FAMILIES[name].labels
        wanted = labels.items()
        return sum(
            count
            for values, count in self._counts.get(name, {}).items()
            if wanted <= dict(zip(names, values, strict=True)).items()
        )

    def counts(self, name: str) -> dict[Labels, int]:
        return dict(self._counts.get(name, {}))

    def distributions(self, name: str) -> dict[Labels, Distribution]:
        return dict(self._distributions.get(name, {}))

    def keep(self, label: str, is_known: Callable[[str], bool]) -> None:
        """Forgets every series whose ``label`` is of something that is no more."""
        for name, family in FAMILIES.items():
            if label in family.labels:
                at = family.labels.index(label)
                for series in (self._counts.get(name, {}), self._distributions.get(name, {})):
                    for key in [key for key in series if key[at] != OTHER and not is_known(key[at])]:
                        del series[key]

    def to_json(self) -> dict[str, int]:
        return dict(sorted(self._named()))

    def _named(self) -> Iterator[tuple[str, int]]:
        for name, series in self._counts.items():
            for values, count in series.items():
                labels = ",".join(f"{key}={value}" for key, value in zip(FAMILIES[name].labels, values, strict=True))
                yield (f"{name}{{{labels}}}" if labels else name), count


def _key(name: str, labels: dict[str, str]) -> Labels:
    assert name in FAMILIES, f"{name}: to be named in gateway/counters.py"
    names = FAMILIES[name].labels
    assert len(labels) == len(names), f"{name} has the labels {names}, not {tuple(labels)}"
    return tuple(labels[label] for label in names)
