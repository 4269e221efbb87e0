"""What the plugin reads from the environment, and its limits. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.policy.waiting import GROWTH_TOKENS
from gateway.wire import is_identifier

REPORT_INTERVAL_S = 0.1
RESERVATION_LEASE_S = 15.0
"""A destination frees what it set aside for a migration that has been silent for so long."""
CLAIM_LIMIT_S = 1.5
"""A committed request that no gateway has opened is given up after this; one that comes later resumes from tokens."""
FREEZE_LIMIT_S = 5.0
"""A source decodes on by itself when a final stage has not ended after this."""
STAGE_TIMEOUT_S = 30.0
PIN_LIMIT_S = 2 * STAGE_TIMEOUT_S
"""A source's blocks that a peer was to read are given up after this, should the migration not have said so."""
COMMIT_TIMEOUT_S = 4.0
"""Less than FREEZE_LIMIT_S: a commit is never answered after its source has gone on by itself."""
PREBIND_WAIT_S = 3.0
"""How long a source goes on decoding for the gateway to open the request at the destination."""
REPLAY_TOKEN_S = 0.002
"""What a replayed token may add to waits; usual are 0.4 ms where each is parsed, and far less elsewhere."""
BIND_WAIT_S = 0.25
"""One stage's answer waits so long for it."""
NEXT_BLOCK_LIMIT_S = 3.0
"""How long a running request is watched for the end of a block, at which it is best stopped."""
BLOCK_MARGIN_TOKENS = 8
"""It is not watched when so few tokens after that it would be at its end."""
MIGRATIONS_IN_MAX = 4
MIGRATIONS_OUT_MAX = 4
STAGES_MAX = 64
DRAIN_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_MAX_S = 3600.0
RESUMES_MAX = 4096
GROWTH_TOKENS_MAX = 4096
SETTLE_S = 1.0
"""A request that has just arrived is not picked to move on before this by a pairing that does not say for itself; and
so long a destination that has just refused is left alone."""
MOVES_COUNTED_MAX = 1_000
"""Of one request; more are not told apart."""


class SettingsError(RuntimeError):
    """The server cannot run with kvferry as it was started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    secret: str
    instance_id: str | None
    advertise_host: str
    """Address under which peers reach this instance's KV agents."""
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    """How long a server that is told to end waits for its requests to be moved away."""


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read ``KVFERRY_*``; raises SettingsError with a sentence that says what to do."""
    secret = environment.get("KVFERRY_SECRET", "")
    if not secret:
        raise SettingsError(
            "kvferry needs KVFERRY_SECRET: the secret that the gateway and all instances share. "
            "Set it to the same random string everywhere, or take kvferry out of VLLM_PLUGINS."
        )
    instance_id = environment.get("KVFERRY_INSTANCE_ID") or None
    if instance_id is not None and not is_identifier(instance_id):
        raise SettingsError("KVFERRY_INSTANCE_ID may hold letters, digits and . _ : - only, 128 characters at most.")
    growth_tokens_from_environment(environment)
    advertise_host = environment.get("KVFERRY_ADVERTISE_HOST", "127.0.0.1")
    return Settings(secret, instance_id, advertise_host, _drain_timeout(environment.get("KVFERRY_DRAIN_TIMEOUT_S")))


def _drain_timeout(value: str | None) -> float:
    if not value:
        return DRAIN_TIMEOUT_S
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = -1.0
    if not 0 <= timeout_s <= DRAIN_TIMEOUT_MAX_S:
        raise SettingsError(f"KVFERRY_DRAIN_TIMEOUT_S must be a number of seconds from 0 to {DRAIN_TIMEOUT_MAX_S:.0f}.")
    return timeout_s


def growth_tokens_from_environment(environment: Mapping[str, str] = os.environ) -> int:
    """Read by the engine's own process; the API server only looks whether it can be read."""
    value = environment.get("KVFERRY_GROWTH_TOKENS", "") or str(GROWTH_TOKENS)
    if not (value.isascii() and value.isdecimal() and int(value) <= GROWTH_TOKENS_MAX):
        raise SettingsError(f"KVFERRY_GROWTH_TOKENS must be a whole number of tokens from 0 to {GROWTH_TOKENS_MAX}.")
    return int(value)
