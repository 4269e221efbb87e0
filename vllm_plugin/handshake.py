"""The handshake of a migration between two llumlets: its messages, and the client that posts them.

Knows nothing of vLLM, so that the fake instance (``loadtest/fake_vllm``) speaks the very same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway import wire


class Refused(Exception):
    """The other side, or this one, does not go on with a migration; the message is the reason."""


class NotCopied(Refused):
    """The destination could not fetch the blocks."""


NOT_COPIED = "not_copied"
"""The code of that answer."""


class Fence:
    """The newest lease of a leader that has given orders here; 0: none has."""

    def __init__(self) -> None:
        self.newest = 0

    def check(self, fence: int | None) -> None:
        """Raises Refused for a leader that has lost its lease to another, and may not know of it yet."""
        if fence is None or not 0 <= fence <= wire.FENCE_MAX:
            return
        if fence < self.newest:
            raise Refused(f"the order is of lease {fence}, and one of lease {self.newest} was here already")
        self.newest = fence


@dataclass(frozen=True)
class Destination:
    instance_id: str
    url: str


class Peer:
    """The destination's handshake routes, for one migration."""

    def __init__(self, http: aiohttp.ClientSession, secret: str, destination: Destination, migration_id: str) -> None:
        self._http = http
        self._headers = {wire.SECRET_HEADER: secret}
        self._url = f"{destination.url.rstrip('/')}/llumlet/migrations/{migration_id}"

    async def post(self, step: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One step of the handshake. Raises Refused with the destination's reason, also when it cannot be reached."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.post(
                f"{self._url}/{step}", json=body, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, RuntimeError, TimeoutError, ValueError) as error:
            # RuntimeError: aiohttp's word for a connection that had closed before the read began.
            raise Refused(f"the destination did not answer {step}: {error!r}") from error
        if response.status != 200 or not isinstance(answer, dict):
            error_body = answer.get("error") if isinstance(answer, dict) else None
            said = error_body if isinstance(error_body, dict) else {}
            kind = NotCopied if said.get("code") == NOT_COPIED else Refused
            raise kind(str(said.get("message") or f"the destination answered {step} with status {response.status}"))
        return answer


@dataclass(frozen=True, slots=True)
class Reserved(wire.Message):
    """A destination's answer to ``reserve``."""

    copy: bool
    reused: int


@dataclass(frozen=True, slots=True)
class Fetched(wire.Message):
    """A destination's answer to ``stage`` and ``commit``."""

    bytes: int
    bound: bool


@dataclass(frozen=True, slots=True)
class Reserve(wire.Message):
    """First step of the handshake: room for a request of which ``blocks`` blocks are finished at the source."""

    request_id: str
    source_id: str
    kv_format: str | None
    agents: list[list[Any]]
    """Host and port of the source's KV agent, a pair a rank."""
    read_token: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    cache_salt: str | None
    blocks: int
    moves: int = 0
    """Of that request before this one."""


def read_agents(agents: list[list[Any]]) -> list[tuple[str, int]]:
    """Host and port, by rank. Raises WireError."""
    addresses: list[tuple[str, int]] = []
    for agent in agents:
        match agent:
            case [str(host), int(port)] if 0 < port < 65536:
                addresses.append((host, port))
            case _:
                raise wire.WireError("agents must be a list of [host, port]")
    return addresses


@dataclass(frozen=True, slots=True)
class Stage(wire.Message):
    """Blocks that were finished since the last step (``source_blocks``: ids at the source), and the output tokens."""

    blocks_from: int
    source_blocks: list[int]
    tokens_from: int
    output_token_ids: list[int]
    wait_s: float
    """How long the source would have the answer wait for the gateway to open the request here."""


@dataclass(frozen=True, slots=True)
class Commit(Stage):
    """The last stage, and the end of the request at the source."""

    output_tokens: int
    logprobs: list[Any] | None
    cached_tokens: int | None
    """The client's prefix hit at the source; ``None`` if it was never scheduled there, so that this one's counts."""


@dataclass(frozen=True, slots=True)
class Abort(wire.Message):
    reason: str = ""
