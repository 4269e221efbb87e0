"""Every Redis key, its time to live and its reason. TTLs are odd, so that one seen in Redis tells where it is from."""

from __future__ import annotations

PREFIX = "kvferry:"

SNAPSHOT = PREFIX + "snapshot"
"""JSON of all reports, written by the leader each tick. Old ones are worse than none, hence the short life."""
SNAPSHOT_TTL_MS = 5_003

LEADER = PREFIX + "leader"
"""``<gateway id>:<fencing token>`` of the lease's holder; it lives as long as the lease."""
LEADER_TOKEN = PREFIX + "leader:token"
"""Counter of leases granted; the fencing tokens. Never expires: a token must not be given twice."""

INSTANCES = PREFIX + "instances"
"""Hash, instance id to JSON (url, boot id, models, healthy), refreshed by each gateway's discovery."""
INSTANCES_TTL_S = 61

OWNER = PREFIX + "owner:"
"""``kvferry:owner:<request id>``, JSON (gateway, instance, model): who serves a request, for admin and cancel.
Refreshed while the request runs; a gateway that dies leaves nothing behind for longer than this."""
OWNER_TTL_S = 97

MIGRATIONS = PREFIX + "migrations"
"""List of JSON records of moves as clients saw them, newest first, bounded."""
MIGRATIONS_MAX = 1_000
MIGRATIONS_TTL_S = 86_413

RESPONSE = PREFIX + "response:"
"""``kvferry:response:<response id>``, ``<instance id> <boot id>``: who holds a stored response, for those that follow
on it. Written once; the instance itself holds it until it ends, so one that is older than this is only lost to us."""
RESPONSES = PREFIX + "responses"
"""Sorted set of those ids by the time of writing, in seconds: it bounds their number, the oldest go first."""
RESPONSES_MAX = 100_000
RESPONSES_TTL_S = 86_423


def response(response_id: str) -> str:
    return RESPONSE + response_id


def owner(request_id: str) -> str:
    return OWNER + request_id
