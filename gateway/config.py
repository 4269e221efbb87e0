"""Settings, from flags first and then the environment. A wrong one is refused by name."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gateway.errors import ConfigError
from gateway.policy.decide import Policy
from gateway.policy.migration import MigrationSettings

WORKERS_MAX = 256


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long to wait for an instance, by what is waited for. Seconds."""

    connect_s: float = 3.0
    first_byte_s: float = 600.0
    """Head of a reply, and the first event: a long prompt in a long queue is silent for minutes."""
    event_gap_s: float = 120.0
    whole_reply_s: float = 3600.0
    """A reply that is not streamed: the whole generation."""
    hang_s: float = 10.0
    """A silent reply is waited for no longer than this, when its server answers nobody else either."""
    moved_s: float = 10.0
    """From the source's last word to the destination's first."""
    header_grace_s: float = 0.25
    """An instance that has said 200 but sent no event yet may still fail: that long the client's status can wait."""


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 64 * 1024 * 1024
    body_s: float = 60.0
    reply_bytes: int = 256 * 1024 * 1024
    recent_requests: int = 256


@dataclass(frozen=True, slots=True)
class Intervals:
    probe_s: float = 2.0
    probe_timeout_s: float = 5.0
    pulse_s: float = 1.0
    """``/health``, which is answered in the middle of an engine step too."""
    watch_s: float = 0.5
    drain_look_s: float = 0.2
    report_stale_s: float = 10.0
    """Reports are made between engine steps: a long prefill is silence, and no reason to refuse requests."""
    leader_tick_s: float = 0.5
    leader_lease_s: float = 3.0
    pairing_lease_s: float = 2.0
    ownership_refresh_s: float = 31.0


@dataclass(frozen=True, slots=True)
class Settings:
    secret: str
    instance_urls: tuple[str, ...]
    redis_url: str = "redis://127.0.0.1:6379/0"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    """Processes on this port, each a gateway of its own: see workers.py."""
    admin_key: str = ""
    """Empty: the admin routes answer 401 to everyone."""
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for, which is only allowed on a loopback address."""
    upstream_api_key: str = ""
    log_level: str = "info"
    budgets: Budgets = field(default_factory=Budgets)
    limits: Limits = field(default_factory=Limits)
    intervals: Intervals = field(default_factory=Intervals)
    policy: Policy = Policy.LLUMNIX
    migration: MigrationSettings = field(default_factory=MigrationSettings)


FLAGS: tuple[tuple[str, str, str, str], ...] = (
    ("--host", "KVFERRY_HOST", "127.0.0.1", "address to listen on"),
    ("--port", "KVFERRY_PORT", "8000", "port to listen on"),
    ("--workers", "KVFERRY_WORKERS", "1", "processes that share the port, each a replica of the gateway"),
    ("--instances", "KVFERRY_INSTANCES", "", "base URLs of the vLLM servers, comma-separated"),
    ("--redis-url", "KVFERRY_REDIS_URL", "redis://127.0.0.1:6379/0", "where the cluster's state is kept"),
    ("--secret", "KVFERRY_SECRET", "", "secret shared with the llumlets"),
    ("--admin-key", "KVFERRY_ADMIN_KEY", "", "key of the admin routes"),
    ("--api-keys", "KVFERRY_API_KEYS", "", "clients' keys, comma-separated; none: loopback only"),
    ("--upstream-api-key", "KVFERRY_UPSTREAM_API_KEY", "", "key that the vLLM servers ask for"),
    ("--log-level", "KVFERRY_LOG_LEVEL", "info", "debug, info, warning or error"),
    ("--policy", "KVFERRY_POLICY", "llumnix", "what the leader moves by itself: llumnix, or none"),
    ("--low-freeness-steps", "KVFERRY_LOW_FREENESS_STEPS", "160", "an instance below this moves requests away"),
    ("--high-freeness-steps", "KVFERRY_HIGH_FREENESS_STEPS", "480", "an instance above this takes them"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    for flag, variable, default, meaning in FLAGS:
        shown = f", default {default}" if default else ""
        parser.add_argument(flag, metavar="VALUE", help=f"{meaning} ({variable}{shown})")


def read_settings(flags: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    values: dict[str, str] = {}
    for flag, variable, default, _ in FLAGS:
        given = getattr(flags, flag.removeprefix("--").replace("-", "_"), None)
        values[variable] = (given if given is not None else environment.get(variable, default)).strip()
    settings = Settings(
        secret=values["KVFERRY_SECRET"],
        instance_urls=_urls("KVFERRY_INSTANCES", values["KVFERRY_INSTANCES"]),
        redis_url=values["KVFERRY_REDIS_URL"],
        host=values["KVFERRY_HOST"],
        port=int(_number("KVFERRY_PORT", values["KVFERRY_PORT"], whole=True)),
        workers=int(_number("KVFERRY_WORKERS", values["KVFERRY_WORKERS"], whole=True)),
        admin_key=values["KVFERRY_ADMIN_KEY"],
        api_keys=_items(values["KVFERRY_API_KEYS"]),
        upstream_api_key=values["KVFERRY_UPSTREAM_API_KEY"],
        log_level=values["KVFERRY_LOG_LEVEL"].lower(),
        policy=_policy(values["KVFERRY_POLICY"]),
        migration=MigrationSettings(
            low_freeness_steps=_number("KVFERRY_LOW_FREENESS_STEPS", values["KVFERRY_LOW_FREENESS_STEPS"]),
            high_freeness_steps=_number("KVFERRY_HIGH_FREENESS_STEPS", values["KVFERRY_HIGH_FREENESS_STEPS"]),
        ),
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    if not settings.secret:
        raise ConfigError(
            "KVFERRY_SECRET (--secret) is missing: set the secret that the vLLM servers were started with."
        )
    if not settings.instance_urls:
        raise ConfigError("KVFERRY_INSTANCES (--instances) is empty: give at least one URL, http://host:port.")
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"KVFERRY_PORT (--port) must be between 0 and 65535, not {settings.port}.")
    if not 1 <= settings.workers <= WORKERS_MAX:
        raise ConfigError(f"KVFERRY_WORKERS (--workers) must be between 1 and {WORKERS_MAX}, not {settings.workers}.")
    if urlsplit(settings.redis_url).scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("KVFERRY_REDIS_URL (--redis-url) must begin with redis://, rediss:// or unix://.")
    if not settings.api_keys and not _is_loopback(settings.host):
        raise ConfigError(
            f"KVFERRY_API_KEYS (--api-keys) is empty, which is allowed on loopback only, not on {settings.host}."
        )
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"KVFERRY_LOG_LEVEL (--log-level) cannot be {settings.log_level!r}.")
    if settings.migration.low_freeness_steps > settings.migration.high_freeness_steps:
        raise ConfigError("KVFERRY_LOW_FREENESS_STEPS must not be above KVFERRY_HIGH_FREENESS_STEPS.")


def _policy(value: str) -> Policy:
    try:
        return Policy(value.lower())
    except ValueError:
        names = " or ".join(Policy)
        raise ConfigError(f"KVFERRY_POLICY (--policy) must be {names}, not {value!r}.") from None


def _items(value: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in value.split(",") if item.strip())


def _urls(name: str, value: str) -> tuple[str, ...]:
    urls = tuple(url.rstrip("/") for url in _items(value))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{name} must hold URLs like http://host:port, not {url!r}.")
    if len(set(urls)) != len(urls):
        raise ConfigError(f"{name} names a URL twice.")
    return urls


def _number(name: str, value: str, whole: bool = False) -> float:
    try:
        return int(value) if whole else float(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be a number, not {value!r}.") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
