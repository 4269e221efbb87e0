"""What instances do in the tests: scripts for :class:`tests.fake_instance.FakeInstance`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway import wire
from tests.conftest import until
from tests.fake_instance import Exchange, FakeInstance, Generation, Script


def normal(data: bytes) -> bytes:
    """The same for every request: each has an id of its own."""
    return re.sub(rb"(chatcmpl|cmpl)-[0-9a-f]{32}", rb"\1-ID", data)


def prebind(to: FakeInstance, migration_id: str = "m1") -> bytes:
    return wire.encode_comment(wire.Prebind(migration_id, to.instance_id))


def unbind(migration_id: str = "m1") -> bytes:
    return wire.encode_comment(wire.Unbind(migration_id))


def moved(to: FakeInstance, output_tokens: int, migration_id: str = "m1") -> bytes:
    return wire.encode_comment(wire.Moved(migration_id, to.instance_id, output_tokens))


def moves_after(tokens: int, to: FakeInstance, migration_id: str = "m1") -> Script:
    """A source: prebinds at once, sends ``tokens`` tokens, commits, and says that it has moved."""

    async def script(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(prebind(to, migration_id))
        await exchange.send(*generation.upto(tokens))
        to.commit(migration_id, tokens)
        await exchange.send(moved(to, tokens, migration_id))
        await exchange.finish()

    return script


def loses_after(tokens: int, how: str) -> Script:
    """An instance that dies after so many tokens: by "fin", "reset", "cut" or a clean end without [DONE]."""

    async def script(exchange: Exchange) -> None:
        await exchange.start(chunked=how != "fin")
        await exchange.send(*Generation(exchange.request).upto(tokens))
        await end(exchange, how)

    return script


async def resets(exchange: Exchange) -> None:
    """Dies without a word."""
    await exchange.reset()


async def end(exchange: Exchange, how: str) -> None:
    match how:
        case "fin":
            return
        case "clean":
            await exchange.finish()
        case "cut":
            await exchange.cut()
        case "reset":
            await exchange.reset()
        case _:
            raise ValueError(how)


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first script, and so on."""
    left = list(scripts)

    async def script(exchange: Exchange) -> None:
        await left.pop(0)(exchange)

    return script


def answers(*blocks: bytes, done: bool = True) -> Script:
    """Fixed bytes, each block one write."""

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*blocks, *([b"data: [DONE]\n\n"] if done else []))
        await exchange.finish()

    return script


async def silent(exchange: Exchange) -> None:
    """Takes the request and says nothing."""
    await exchange.client_gone.wait()


async def starts_and_waits(exchange: Exchange) -> None:
    """Two tokens, and then nothing until the client goes."""
    await exchange.start()
    await exchange.send(*Generation(exchange.request).upto(2))
    await exchange.client_gone.wait()


async def gone(*exchanges: Exchange, within_s: float = 5.0) -> None:
    """Fails unless the gateway has closed these connections in time."""
    await until(lambda: all(exchange.client_gone.is_set() for exchange in exchanges), within_s)


def one_byte_each(blocks: Iterable[bytes]) -> list[bytes]:
    return [bytes([byte]) for block in blocks for byte in block]
