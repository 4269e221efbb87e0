"""What operators are told of the gateways of a cluster: who lives, who leads, and what each has in flight where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.cluster.replicas import Replicas
from gateway.errors import StoreUnavailable
from gateway.wire import is_identifier

QUESTION = "gateway"
ANSWER_WAIT_S = 0.5
"""Who asks for the instances may ask twice a second, and wants to know of them first."""


@dataclass(frozen=True, slots=True)
class Seen:
    gateways: list[dict[str, Any]]
    """``id``, ``answered``, and ``leading``, which is ``None`` of one that has not answered."""
    in_flight: Mapping[str, int]
    """By instance id, of all that have answered."""
    complete: bool
    """All that live have answered."""


class Gateways:
    """``replicas`` asks the others through Redis; without it a gateway knows of itself alone."""

    def __init__(
        self,
        gateway_id: str,
        replicas: Replicas,
        in_flight: Callable[[], Mapping[str, int]],
        is_leading: Callable[[], bool],
        redis_is_up: Callable[[], bool],
    ) -> None:
        self._gateway_id = gateway_id
        self._replicas = replicas
        self._in_flight = in_flight
        self._is_leading = is_leading
        self._redis_is_up = redis_is_up

    def own(self) -> dict[str, Any]:
        """Also the answer to another gateway's question."""
        return {"leading": self._is_leading(), "in_flight": dict(self._in_flight())}

    async def look(self) -> Seen:
        others = self._replicas.others
        try:
            answers = await self._replicas.ask(others, QUESTION, {}, ANSWER_WAIT_S)
        except StoreUnavailable:
            answers = {}
        said = {self._gateway_id: self.own()} | {one: words for one, words in answers.items() if _can_be_read(words)}
        in_flight = Counter[str]()
        for words in said.values():
            in_flight.update(words["in_flight"])
        gateways = [
            {"id": one, "answered": one in said, "leading": said[one]["leading"] if one in said else None}
            for one in sorted({self._gateway_id, *others})
        ]
        return Seen(gateways, in_flight, self._redis_is_up() and others <= said.keys())


def _can_be_read(words: Mapping[str, Any]) -> bool:
    match words:
        case {"leading": bool(), "in_flight": dict(in_flight)}:
            return all(is_identifier(one) and type(count) is int and count >= 0 for one, count in in_flight.items())
        case _:
            return False
