"""When an instance that answers is not to be trusted: ejection with hysteresis, back-off and a bound on the share.

Hard facts, such as a connection that is refused or an engine that says it is dead, are not suspicions: they count at
once and without a bound (members.py). Both ways back lead over several good probes in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthSettings:
    failures_max: int = 3
    """Requests in a row that an instance fails before it is ejected."""
    good_probes_min: int = 2
    """In a row, before an instance that was ejected or lost gets requests again. A new life needs one."""
    ejected_first_s: float = 2.0
    ejected_most_s: float = 60.0
    """Each ejection lasts twice as long as the one before, until a request succeeds."""
    ejected_share_max: float = 0.5
    """Of a model's instances; never all of them, however bad they look."""
    stall_s: float = 30.0
    """Requests wait for their first or next token, and the engine shows no progress at all."""


@dataclass(slots=True)
class Health:
    """One instance's record. ``now`` is the process's monotonic clock."""

    ejected_why: str | None = None
    good_probes: int = 0
    """In a row, since the last bad one or since the ejection."""
    ejections_total: int = 0
    _failures: int = 0
    _ejections: int = 0
    _ejected_until: float = -math.inf

    def worked(self) -> None:
        """A request came to its end there."""
        self._failures = self._ejections = 0

    def failed(self, settings: HealthSettings) -> bool:
        """Whether it has failed often enough to be ejected."""
        self._failures += 1
        return self._failures >= settings.failures_max

    def eject(self, why: str, now: float, settings: HealthSettings) -> None:
        lasts_s = min(settings.ejected_first_s * 2**self._ejections, settings.ejected_most_s)
        self.ejected_why, self.good_probes = why, 0
        self._ejected_until = now + lasts_s
        self.ejections_total += 1
        self._ejections = min(self._ejections + 1, 32)

    def probed_well(self, now: float, settings: HealthSettings) -> bool:
        """Whether that makes enough good probes in a row. Once back, one more failure ejects it again."""
        self.good_probes += 1
        enough = self.good_probes >= settings.good_probes_min
        if self.ejected_why is not None and enough and now >= self._ejected_until:
            self.ejected_why = None
            self._failures = settings.failures_max - 1
        return enough

    def probed_badly(self) -> None:
        self.good_probes = 0


def may_eject_one(group: Sequence[Health], settings: HealthSettings) -> bool:
    """Whether one more of these, which are all that serve a model and answer, may be ejected on suspicion."""
    ejected = sum(health.ejected_why is not None for health in group)
    return ejected + 1 <= min(math.floor(settings.ejected_share_max * len(group)), len(group) - 1)
