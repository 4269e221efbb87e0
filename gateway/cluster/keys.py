"""Every Redis key, its time to live and its reason. TTLs are odd, so that one seen in Redis tells where it is from.

Two keys have none: the counter of leases, since a token must not be given twice, and the operators' orders about
addresses, since they hold until they are taken back. What grows has a bound beside it.
"""

from __future__ import annotations

PREFIX = "kvferry:"

SNAPSHOT = PREFIX + "snapshot"
"""Hash: all reports as ``json``, whose lease they were written under (``holder``), and the ``number`` among those.
Written by the leader each tick. Old ones are worse than none, hence the short life."""
SNAPSHOT_TTL_MS = 5_003

LEADER = PREFIX + "leader"
"""``<gateway id>:<fencing token>`` of the lease's holder; it lives as long as the lease."""
LEADER_TOKEN = PREFIX + "leader:token"
"""Counter of leases granted; the fencing tokens. Never expires. Lost with Redis's memory, it goes on from the highest
token that the instances have seen (``Report.fence``), which a gateway names when it asks for the lease."""

INSTANCES = PREFIX + "instances"
"""Hash, instance id to JSON (url, boot id, models, healthy), refreshed by the leader's discovery. For other tools."""
INSTANCES_TTL_S = 61

EPOCH = PREFIX + "epoch"
"""A random word, made by the first gateway that finds none. Another word than before: Redis has lost its memory, and
each gateway writes down again what it knows. Renewed with each beat of a gateway."""
EPOCH_TTL_MS = 3_600_007

GATEWAYS = PREFIX + "gateways"
"""Sorted set, gateway id to the time (ms, Redis's) when it counts as gone: who is asked about all requests."""
GATEWAYS_TTL_MS = 5_009
GATEWAYS_MAX = 1_024
"""Listed, and asked, at most."""

TARGETS = PREFIX + "targets"
"""Hash, URL of an instance to ``added`` or ``removed:<time of it, seconds, Redis's>``: what operators have ordered.
Never expires. When it is full, removals of more than a day ago make room, and else a new order is refused."""
TARGETS_MAX = 1_024
TARGETS_REMOVED_KEPT_S = 86_400

CALLS = PREFIX + "calls:"
"""``kvferry:calls:<gateway id>``: list of JSON questions to that gateway about its requests. It takes them at once; of
a gateway that is gone they go with this, and of one that stands still the oldest go first."""
CALLS_TTL_MS = 5_021
CALLS_MAX = 256

ANSWERS = PREFIX + "answers:"
"""``kvferry:answers:<call id>``: list of JSON answers. Taken at once by who has asked, else gone with this."""
ANSWERS_TTL_MS = 5_039

OWNER = PREFIX + "owner:"
"""``kvferry:owner:<request id>``, JSON (gateway, instance, model): who serves a request, for admin and cancel.
Refreshed while the request runs; a gateway that dies leaves nothing behind for longer than this."""
OWNER_TTL_S = 97

MIGRATIONS = PREFIX + "migrations"
"""List of JSON records of moves as clients saw them, newest first, bounded. Each gateway writes those of its own
clients, leader or not: so there is no lease to check."""
MIGRATIONS_MAX = 1_000
MIGRATIONS_TTL_S = 86_413

RESPONSE = PREFIX + "response:"
"""``kvferry:response:<response id>``, ``<instance id> <boot id>``: who holds a stored response, for those that follow
on it. Written once; the instance itself holds it until it ends, so one that is older than this is only lost to us."""
RESPONSES = PREFIX + "responses"
"""Sorted set of those ids by the time of writing, in seconds of Redis's clock: it bounds their number, the oldest go
first."""
RESPONSES_MAX = 100_000
RESPONSES_TTL_S = 86_423

LIMIT = PREFIX + "limit:"
"""``kvferry:limit:{<key name>}:requests`` and ``:tokens``: hashes, second of Redis's clock to what was used in it, for
a key's last minute. Bounded by the minute's seconds, refreshed by each request, of no use a minute after the last."""
LIMIT_WINDOW_TTL_S = 83

LIMIT_PLACE_TTL_S = 29
"""``kvferry:limit:{<key name>}:running``: sorted set, request id to the time (ms, Redis's) when its place lapses.
Renewed while the request runs, so that a gateway that dies holds its places no longer than this."""
LIMIT_PLACE_RENEWAL_S = 7

LIMIT_PROBE = PREFIX + "limit:probe"
"""Written by a gateway that applies the limits by itself, to see whether Redis takes writes again."""
LIMIT_PROBE_TTL_S = 11

WAITING = PREFIX + "{waiting}:"
"""Of the requests that wait for room, one line a model (the braces keep all in one slot). Told again by each gateway
while it has some, so that lines that nobody waits in any more end by themselves."""
WAITING_TTL_MS = 19_013
"""``kvferry:{waiting}:order:<model>``: sorted set, request id to its class and time of arrival (us, Redis's clock).
``kvferry:{waiting}:details:<model>``: hash, request id to ``<gateway id> <tokens of its prompt>``."""
WAITING_GATEWAYS = WAITING + "gateways"
"""Sorted set, gateway id to the time (us, Redis's) until which its entries count: those of a gateway that has died are
dropped by whoever looks next."""
WAITING_GATEWAY_TTL_MS = 5_009
WAITING_RENEWAL_S = 1.0


def owner(request_id: str) -> str:
    return OWNER + request_id


def calls(gateway_id: str) -> str:
    return CALLS + gateway_id


def answers(call_id: str) -> str:
    return ANSWERS + call_id


def response(response_id: str) -> str:
    return RESPONSE + response_id


def limit_requests(key_name: str) -> str:
    return f"{LIMIT}{{{key_name}}}:requests"


def limit_tokens(key_name: str) -> str:
    return f"{LIMIT}{{{key_name}}}:tokens"


def limit_running(key_name: str) -> str:
    return f"{LIMIT}{{{key_name}}}:running"


def waiting_order(model: str) -> str:
    return f"{WAITING}order:{model}"


def waiting_details(model: str) -> str:
    return f"{WAITING}details:{model}"
