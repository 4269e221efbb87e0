"""Settings: flags before the environment before the file. A wrong one is refused by name, and by where it is from."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gateway.access import Key
from gateway.cluster.health import HealthSettings
from gateway.cluster.targets import DNS_SCHEME, read_name, read_url
from gateway.config_sources import FILE_FLAG, Values, gather, unknown_variables
from gateway.errors import ConfigError
from gateway.keys_file import read_keys_file
from gateway.openai.caps import Caps, read_caps
from gateway.policy.decide import Policy
from gateway.policy.migration import MigrationSettings
from gateway.policy.picking import PickRules
from gateway.policy.policies import POLICIES
from gateway.policy.waiting import WaitingRules
from gateway.shutdown import ShutdownSettings
from gateway.telemetry import log
from gateway.wire import PriorityClass

OURS, PAPERS = POLICIES["kvferry"], POLICIES["llumnix"]
"""The simulator runs the same: what is not set here is what they say."""
TARGET_TOKENS_MAX = 10**9
MOVES_AT_ONCE_MAX = 4
"""A llumlet moves no more."""
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
    total_s: float = 7200.0
    """A whole request, streamed or not, on however many instances."""
    client_stuck_s: float = 120.0
    """A client that takes not one byte for so long while there is something for it."""
    head_s: float = 60.0
    """A client that has connected, until it has said what it wants: the head of a request."""
    instance_wait_s: float = 2.0
    """While none of a model's instances is usable."""
    room_wait_s: float = 300.0
    """While none of them has room."""
    order_s: float = 0.1
    """For Redis, to say who of those that wait comes first. Without an answer each gateway orders its own."""
    header_grace_s: float = 0.25
    """An instance that has said 200 but sent no event yet may still fail: that long the client's status can wait."""
    limits_s: float = 0.1
    """For Redis, wherever a request needs it: to say whether a key's limits allow it, and where a stored response is.
    Without an answer the gateway goes on by itself, and no request waits again until Redis is back."""


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 64 * 1024 * 1024
    body_s: float = 60.0
    reply_bytes: int = 256 * 1024 * 1024
    recent_requests: int = 256
    requests_per_instance: int = 1024
    """Of one gateway at a time."""
    queue_per_instance: int = 256
    """Requests that wait for a model, at its instances and at the gateways, for each of its usable instances: with
    more, new ones are turned away."""
    waiters: int = 4096
    """Requests that may wait in one gateway, for an instance to become usable or to have room."""


@dataclass(frozen=True, slots=True)
class Intervals:
    probe_s: float = 2.0
    probe_timeout_s: float = 5.0
    pulse_s: float = 1.0
    """``/health``, which is answered in the middle of an engine step too."""
    watch_s: float = 0.5
    drain_look_s: float = 0.2
    unheard_s: float = 5.0
    """Of an instance that answers nothing at all for so long: it gets no new requests."""
    report_stale_s: float = 10.0
    """Reports are made between engine steps: a long prefill is silence, and no reason to refuse requests."""
    leader_tick_s: float = 0.5
    leader_lease_s: float = 1.25
    """With a tick: how long a cluster is without a leader when its leader is gone, at most."""
    pairing_lease_s: float = 2.0
    ownership_refresh_s: float = 31.0
    keys_file_s: float = 2.0
    beat_s: float = 1.0
    """How often a gateway says in Redis that it lives, and reads what operators have ordered."""
    limits_s: float = 0.5
    """How often a gateway that applies the limits by itself asks whether Redis is back."""


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
    keys_file: str = ""
    named_keys: tuple[Key, ...] = ()
    """From the keys file, with their limits."""
    caps: Caps = field(default_factory=Caps)
    sends_priority: bool = True
    upstream_api_key: str = ""
    log_level: str = "info"
    log_format: str = "text"
    metrics_key: str = ""
    """Empty: ``/metrics`` is open on a loopback address, and else asks for the admin key."""
    tracing: str = "off"
    budgets: Budgets = field(default_factory=Budgets)
    limits: Limits = field(default_factory=Limits)
    intervals: Intervals = field(default_factory=Intervals)
    health: HealthSettings = field(default_factory=HealthSettings)
    shutdown: ShutdownSettings = field(default_factory=ShutdownSettings)
    late_binding: bool = True
    waiting: WaitingRules = OURS.waiting
    policy: Policy = OURS.leader.policy
    migration: MigrationSettings = OURS.leader.migration
    picking: PickRules = OURS.picking
    moves_at_once: int = OURS.moves_at_once
    """Out of an instance, by the leader's policy."""
    target_loads: Mapping[PriorityClass, int] = field(default_factory=dict)
    """Of the classes with headroom, in tokens: see policy/protection.py."""

    @property
    def metrics_open(self) -> bool:
        return not self.metrics_key and _is_loopback(self.host)


FLAGS: tuple[tuple[str, str, str, str], ...] = (
    ("--host", "KVFERRY_HOST", "127.0.0.1", "address to listen on"),
    ("--port", "KVFERRY_PORT", "8000", "port to listen on"),
    ("--workers", "KVFERRY_WORKERS", "1", "processes that share the port, each a replica of the gateway"),
    ("--instances", "KVFERRY_INSTANCES", "", "base URLs of the vLLM servers, or dns://name:port, comma-separated"),
    ("--redis-url", "KVFERRY_REDIS_URL", "redis://127.0.0.1:6379/0", "where the cluster's state is kept"),
    ("--secret", "KVFERRY_SECRET", "", "secret shared with the llumlets"),
    ("--admin-key", "KVFERRY_ADMIN_KEY", "", "key of the admin routes"),
    ("--api-keys", "KVFERRY_API_KEYS", "", "clients' keys, comma-separated; none: loopback only"),
    ("--keys-file", "KVFERRY_KEYS_FILE", "", "TOML file of clients' keys with their limits"),
    ("--caps", "KVFERRY_CAPS", "", "bounds on what one request may ask for: n=16,stop=8"),
    ("--send-priority", "KVFERRY_SEND_PRIORITY", "on", "tell the vLLM servers a request's priority: on or off"),
    ("--upstream-api-key", "KVFERRY_UPSTREAM_API_KEY", "", "key that the vLLM servers ask for"),
    ("--log-level", "KVFERRY_LOG_LEVEL", "info", "debug, info, warning or error"),
    ("--log-format", "KVFERRY_LOG_FORMAT", "text", "text, or json: one object a line"),
    ("--metrics-key", "KVFERRY_METRICS_KEY", "", "key of /metrics; none: open on loopback, else the admin key"),
    ("--tracing", "KVFERRY_TRACING", "off", "off, or otlp: OpenTelemetry, set up by the OTEL_* variables"),
    ("--late-binding", "KVFERRY_LATE_BINDING", "on", "requests wait here until an instance has room: on or off"),
    ("--policy", "KVFERRY_POLICY", OURS.leader.policy.value, "what the leader moves: kvferry, llumnix or none"),
    (
        *("--low-freeness-steps", "KVFERRY_LOW_FREENESS_STEPS", f"{OURS.leader.migration.low_freeness_steps:g}"),
        "an instance below this moves requests away",
    ),
    (
        *("--high-freeness-steps", "KVFERRY_HIGH_FREENESS_STEPS", f"{OURS.leader.migration.high_freeness_steps:g}"),
        "an instance above this takes them",
    ),
    (
        *("--moves-at-once", "KVFERRY_MOVES_AT_ONCE", f"{OURS.moves_at_once}"),
        "requests on their way out of an instance, with the policy kvferry",
    ),
    (
        "--target-loads",
        "KVFERRY_TARGET_LOADS",
        "",
        "tokens on an instance beyond which a class has headroom: high=1600",
    ),
)


_NUMBERS: tuple[tuple[str, str, str, str], ...] = (
    ("CONNECT_TIMEOUT_S", "budgets", "connect_s", "to connect to an instance, or to wait for a free connection"),
    ("FIRST_BYTE_TIMEOUT_S", "budgets", "first_byte_s", "until a stream's first event"),
    ("EVENT_GAP_TIMEOUT_S", "budgets", "event_gap_s", "between two events of a stream"),
    ("WHOLE_REPLY_TIMEOUT_S", "budgets", "whole_reply_s", "for a reply that is not streamed"),
    ("TOTAL_TIMEOUT_S", "budgets", "total_s", "for a whole request, streamed or not"),
    ("HANG_TIMEOUT_S", "budgets", "hang_s", "for a reply of an instance that answers nothing at all"),
    ("CLIENT_STUCK_TIMEOUT_S", "budgets", "client_stuck_s", "for a client that has stopped reading"),
    ("REDIS_BUDGET_S", "budgets", "limits_s", "for Redis, by a request that needs it"),
    ("INSTANCE_WAIT_S", "budgets", "instance_wait_s", "for one of a model's instances to become usable"),
    ("ROOM_WAIT_S", "budgets", "room_wait_s", "for one of a model's instances to have room"),
    ("COOL_DOWN_S", "picking", "cool_down_s", "a moved request stays, with the policy kvferry"),
    ("MOVES_MAX", "picking", "moves_max", "moves of one request, with the policy kvferry; then it stays"),
    ("AGED_AFTER_S", "waiting", "aged_s", "of waiting, after which the oldest request comes first"),
    ("REQUESTS_PER_INSTANCE_MAX", "limits", "requests_per_instance", "one gateway's requests at an instance at a time"),
    ("QUEUE_PER_INSTANCE_MAX", "limits", "queue_per_instance", "requests waiting per instance; then new ones get 503"),
    ("WAITERS_MAX", "limits", "waiters", "requests that wait in one gateway at a time"),
    ("SHUTDOWN_ACCEPT_S", "shutdown", "accept_s", "new requests are still taken after SIGTERM"),
    ("SHUTDOWN_GRACE_S", "shutdown", "grace_s", "after SIGTERM for requests under way to end"),
)
"""Variable without its prefix, group and field in the settings, meaning. The default is the field's own."""


def _default(group: str, name: str) -> str:
    return f"{getattr(getattr(Settings('', ()), group), name):g}"


FLAGS += tuple(
    (f"--{name.lower().replace('_', '-')}", f"KVFERRY_{name}", _default(group, field_name), meaning)
    for name, group, field_name, meaning in _NUMBERS
)


_MAY_BE_ZERO = frozenset({"COOL_DOWN_S", "INSTANCE_WAIT_S", "SHUTDOWN_ACCEPT_S", "SHUTDOWN_GRACE_S"})


def add_flags(parser: argparse.ArgumentParser) -> None:
    for flag, variable, default, meaning in (FILE_FLAG, *FLAGS):
        shown = f", default {default}" if default else ""
        parser.add_argument(flag, metavar="VALUE", help=f"{meaning} ({variable}{shown})")


def read_settings(flags: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    return settings_from(read_values(flags, environment))


def warn_of_unknown(environment: Mapping[str, str]) -> None:
    """A slip in a variable's name would else go unseen. Names only: the value may be a secret."""
    for name, meant in unknown_variables(FLAGS, environment):
        hint = {} if meant is None else {"meant": meant}
        log("unknown_variable", level=logging.WARNING, name=name, **hint)


def read_values(flags: argparse.Namespace, environment: Mapping[str, str]) -> Values:
    return gather(FLAGS, vars(flags), environment)


def settings_from(values: Values) -> Settings:
    try:
        return _settings(values)
    except ConfigError as error:
        raise ConfigError(values.naming_origins(error.message)) from error


def _settings(values: Mapping[str, str]) -> Settings:
    settings = Settings(
        secret=values["KVFERRY_SECRET"],
        instance_urls=_urls("KVFERRY_INSTANCES", values["KVFERRY_INSTANCES"]),
        redis_url=values["KVFERRY_REDIS_URL"],
        host=values["KVFERRY_HOST"],
        port=int(_number("KVFERRY_PORT", values["KVFERRY_PORT"], whole=True)),
        workers=int(_number("KVFERRY_WORKERS", values["KVFERRY_WORKERS"], whole=True)),
        admin_key=values["KVFERRY_ADMIN_KEY"],
        api_keys=_items(values["KVFERRY_API_KEYS"]),
        keys_file=values["KVFERRY_KEYS_FILE"],
        named_keys=read_keys_file(values["KVFERRY_KEYS_FILE"]) if values["KVFERRY_KEYS_FILE"] else (),
        caps=_caps(values["KVFERRY_CAPS"]),
        sends_priority=_switch("KVFERRY_SEND_PRIORITY", values["KVFERRY_SEND_PRIORITY"]),
        upstream_api_key=values["KVFERRY_UPSTREAM_API_KEY"],
        log_level=values["KVFERRY_LOG_LEVEL"].lower(),
        log_format=values["KVFERRY_LOG_FORMAT"].lower(),
        metrics_key=values["KVFERRY_METRICS_KEY"],
        tracing=values["KVFERRY_TRACING"].lower(),
        late_binding=_switch("KVFERRY_LATE_BINDING", values["KVFERRY_LATE_BINDING"]),
        policy=_policy(values["KVFERRY_POLICY"]),
        migration=dataclasses.replace(
            OURS.leader.migration,
            low_freeness_steps=_number("KVFERRY_LOW_FREENESS_STEPS", values["KVFERRY_LOW_FREENESS_STEPS"]),
            high_freeness_steps=_number("KVFERRY_HIGH_FREENESS_STEPS", values["KVFERRY_HIGH_FREENESS_STEPS"]),
        ),
        moves_at_once=int(_number("KVFERRY_MOVES_AT_ONCE", values["KVFERRY_MOVES_AT_ONCE"], whole=True)),
        target_loads=_target_loads(values["KVFERRY_TARGET_LOADS"]),
    )
    settings = _with_numbers(settings, values)
    if settings.policy is Policy.LLUMNIX:
        migration = dataclasses.replace(settings.migration, guards_destination=False)
        settings = dataclasses.replace(
            settings, migration=migration, picking=PAPERS.picking, moves_at_once=PAPERS.moves_at_once
        )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    if not settings.secret:
        raise ConfigError(
            "KVFERRY_SECRET (--secret) is missing: set the secret that the vLLM servers were started with."
        )
    if not settings.instance_urls:
        raise ConfigError(
            "KVFERRY_INSTANCES (--instances) is empty: give at least one URL, http://host:port or dns://name:port."
        )
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"KVFERRY_PORT (--port) must be between 0 and 65535, not {settings.port}.")
    if not 1 <= settings.workers <= WORKERS_MAX:
        raise ConfigError(f"KVFERRY_WORKERS (--workers) must be between 1 and {WORKERS_MAX}, not {settings.workers}.")
    if urlsplit(settings.redis_url).scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("KVFERRY_REDIS_URL (--redis-url) must begin with redis://, rediss:// or unix://.")
    if not settings.api_keys and not settings.named_keys and not _is_loopback(settings.host):
        raise ConfigError(
            "KVFERRY_API_KEYS (--api-keys) and KVFERRY_KEYS_FILE (--keys-file) are empty, which is allowed on loopback"
            f" only, not on {settings.host}."
        )
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"KVFERRY_LOG_LEVEL (--log-level) cannot be {settings.log_level!r}.")
    if settings.log_format not in ("text", "json"):
        raise ConfigError(f"KVFERRY_LOG_FORMAT (--log-format) must be text or json, not {settings.log_format!r}.")
    if settings.tracing not in ("off", "otlp"):
        raise ConfigError(f"KVFERRY_TRACING (--tracing) must be off or otlp, not {settings.tracing!r}.")
    if settings.migration.low_freeness_steps > settings.migration.high_freeness_steps:
        raise ConfigError("KVFERRY_LOW_FREENESS_STEPS must not be above KVFERRY_HIGH_FREENESS_STEPS.")
    if not 1 <= settings.moves_at_once <= MOVES_AT_ONCE_MAX:
        raise ConfigError(
            f"KVFERRY_MOVES_AT_ONCE (--moves-at-once) must be between 1 and {MOVES_AT_ONCE_MAX},"
            f" not {settings.moves_at_once}."
        )
    if settings.target_loads and not settings.sends_priority:
        raise ConfigError("KVFERRY_TARGET_LOADS needs KVFERRY_SEND_PRIORITY: servers have to know who is urgent.")


def _with_numbers(settings: Settings, values: Mapping[str, str]) -> Settings:
    """Each more than 0, except for what may be switched off by it."""
    for name, group, field_name, _ in _NUMBERS:
        variable = f"KVFERRY_{name}"
        part = getattr(settings, group)
        value = _number(variable, values[variable], whole=type(getattr(part, field_name)) is int)
        least = 0.0 if name in _MAY_BE_ZERO else sys.float_info.min
        if not least <= value < math.inf:
            raise ConfigError(f"{variable} must be {'0 or more' if least == 0 else 'above 0'}, not {value:g}.")
        changed = dataclasses.replace(part, **{field_name: value})
        settings = dataclasses.replace(settings, **{group: changed})
    return settings


def _policy(value: str) -> Policy:
    try:
        return Policy(value.lower())
    except ValueError:
        names = " or ".join(Policy)
        raise ConfigError(f"KVFERRY_POLICY (--policy) must be {names}, not {value!r}.") from None


def _caps(value: str) -> Caps:
    try:
        return read_caps(value)
    except ValueError as error:
        raise ConfigError(f"KVFERRY_CAPS (--caps): {error}.") from None


def _target_loads(value: str) -> dict[PriorityClass, int]:
    loads: dict[PriorityClass, int] = {}
    words = {one.word: one for one in PriorityClass}
    for entry in _items(value):
        word, _, tokens = entry.partition("=")
        if (one := words.get(word.strip().lower())) is None or one in loads:
            raise ConfigError(
                f"KVFERRY_TARGET_LOADS (--target-loads) must name each of {', '.join(words)} once at most,"
                f" as in high=1600, not {entry!r}."
            )
        loads[one] = int(_number("KVFERRY_TARGET_LOADS", tokens, whole=True))
        if not 0 <= loads[one] <= TARGET_TOKENS_MAX:
            raise ConfigError(f"KVFERRY_TARGET_LOADS must hold tokens from 0 to {TARGET_TOKENS_MAX}, not {tokens}.")
    return loads


def _switch(name: str, value: str) -> bool:
    if value.lower() not in ("on", "off"):
        raise ConfigError(f"{name} must be on or off, not {value!r}.")
    return value.lower() == "on"


def _items(value: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in value.split(",") if item.strip())


def _urls(name: str, value: str) -> tuple[str, ...]:
    urls = tuple(_url(name, url) for url in _items(value))
    if len(set(urls)) != len(urls):
        raise ConfigError(f"{name} names a URL twice.")
    return urls


def _url(name: str, url: str) -> str:
    try:
        return read_name(url) if urlsplit(url).scheme == DNS_SCHEME else read_url(url)
    except ValueError as error:
        raise ConfigError(f"{name} must hold URLs like http://host:port or dns://name:port, not {url!r}.") from error


def _number(name: str, value: str, whole: bool = False) -> float:
    try:
        return int(value) if whole else float(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}.") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
