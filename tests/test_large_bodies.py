"""F41: a large body is parsed where it holds up nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from gateway import large_bodies
from gateway.errors import BadRequest
from gateway.large_bodies import SMALL_BODY_BYTES, TEXT_BYTES_MAX, VALUES_MAX, LargeBodies, takes_long
from gateway.openai.body import read_body
from tests.conftest import StartGateway, chat_body, until
from tests.fake_instance import instances

LARGE = json.dumps({"model": "m", "prompt": [7] * SMALL_BODY_BYTES, "stream": True}).encode()


def where(raw: bytes) -> int:
    return os.getpid()


def dies(raw: bytes) -> int:
    if os.getpid() != int(raw.partition(b" ")[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


async def test_a_large_body_is_parsed_in_another_process_with_the_same_result() -> None:
    """And what is wrong with one is said as of a small one; and one whose process is killed is parsed all the same."""
    bodies = LargeBodies()
    try:
        assert await bodies.parse(where, b"small") == os.getpid()
        assert await bodies.parse(where, LARGE) != os.getpid()
        assert await bodies.parse(read_body, LARGE) == read_body(LARGE)
        wrong = LARGE[:-1] + b',"kv_transfer_params":{}}'
        with pytest.raises(BadRequest) as raised:
            await bodies.parse(read_body, wrong)
        assert (raised.value.param, raised.value.status) == ("kv_transfer_params", 400)
        with pytest.raises(BadRequest, match="valid JSON"):
            await bodies.parse(read_body, LARGE[:-1])
        assert await bodies.parse(dies, f"{os.getpid()} ".encode() + LARGE) == os.getpid()
    finally:
        bodies.close()


def test_what_takes_long_is_told_by_its_values_and_text_by_its_size() -> None:
    """A long prompt that is text costs less here than its way to another process."""
    text = b'{"prompt":"' + b"x" * (TEXT_BYTES_MAX // 2) + b'"}'
    assert not takes_long(text)
    assert takes_long(text + b" " * TEXT_BYTES_MAX)
    assert takes_long(b"[" + b"7," * SMALL_BODY_BYTES + b"7]")
    assert not takes_long(b'["' + b"x" * SMALL_BODY_BYTES + b'"' + b",7" * VALUES_MAX + b"]")


async def test_a_gateway_parses_a_large_body_off_its_event_loop(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        body = chat_body(messages=[{"role": "user", "content": "hello"}] * 20_000)
        reply = await running.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200
        assert len(a.received[0].json["messages"]) == 20_000
        pool = running.gateway._routes.bodies._pool
        assert pool is not None
        (process,) = pool._processes.values()
    # Not join(): the pool's own thread waits for it as well, and only one of two waiters is told how it ended.
    await until(lambda: process.exitcode is not None)


async def test_streams_and_health_go_on_while_large_bodies_are_parsed_for_as_long_as_that_takes(
    start_gateway: StartGateway,
) -> None:
    """The process that parses them is stopped, and stands for one that needs for ever."""
    large = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 8 * 1024 * 1024}])).encode()
    headers = {"content-type": "application/json"}
    async with instances("a") as (a,), start_gateway(a) as running:

        async def post_large() -> int:
            answer = await running.client.post("/v1/chat/completions", content=large, headers=headers, timeout=300)
            return answer.status_code

        assert await post_large() == 200
        pool = running.gateway._routes.bodies._pool
        assert pool is not None
        (process,) = pool._processes.values()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            waiting = [asyncio.create_task(post_large()) for _ in range(2)]
            await until(lambda: len(pool._pending_work_items) == 2, 60)
            streams = await asyncio.gather(*(running.stream() for _ in range(50)))
            assert all(stream.endswith(b"data: [DONE]\n\n") for stream in streams)
            assert (await running.client.get("/health")).status_code == 200
            assert not any(task.done() for task in waiting)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.gather(*waiting) == [200] * 2
    await until(lambda: process.exitcode is not None)


HOLDS = """
import asyncio, os
from gateway.large_bodies import SMALL_BODY_BYTES, LargeBodies
from tests.test_large_bodies import where

async def main():
    print(await LargeBodies().parse(where, b"," * SMALL_BODY_BYTES), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_the_process_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "holds.py").write_text(HOLDS)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, str(tmp_path / "holds.py")), env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    process = int(await asyncio.wait_for(gateway.stdout.readline(), 60))
    try:
        gateway.kill()
        await gateway.wait()
        await until(lambda: not runs(process), 30)
    finally:
        if runs(process):
            os.kill(process, signal.SIGKILL)


async def test_a_process_that_came_after_a_lost_one_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several requests that see the loss, the second one must not end what the first one has started anew."""
    bodies = LargeBodies()
    with ProcessPoolExecutor(1) as newer:

        def another_was_first(_: str) -> None:
            bodies.close()
            bodies._pool = newer

        monkeypatch.setattr(large_bodies, "log", another_was_first)
        assert await bodies.parse(dies, f"{os.getpid()} ".encode() + LARGE) == os.getpid()
        assert bodies._pool is newer


def runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
