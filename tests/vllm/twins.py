"""What a request gives that nobody moves: several tests compare with the same one, which runs once for all of them."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

from loadtest.client import Client, Reply
from loadtest.stack import Stack

_TWINS: WeakKeyDictionary[Stack, dict[str, Reply]] = WeakKeyDictionary()


async def twin(client: Client, path: str, **body: Any) -> Reply:
    """Only for requests that are greedy or seeded. Not to be changed."""
    known = _TWINS.setdefault(client.stack, {})
    key = json.dumps([path, body], sort_keys=True)
    if key not in known:
        known[key] = await client.run(path, **body)
    return known[key]
