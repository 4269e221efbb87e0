import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import ProcessFailed
from loadtest.stack import Stack, StackFailed

FAKE_SERVER = (sys.executable, str(Path(__file__).parent / "fake_server.py"))


def build_stack(tmp_path: Path, **arguments: Any) -> Stack:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return Stack(
        gateway=False,
        model_directory=model,
        log_directory=tmp_path / "logs",
        terminate_timeout_s=0.2,
        **{"vllm_command": FAKE_SERVER, "start_timeout_s": 30, **arguments},
    )


def assert_all_gone(stack: Stack) -> None:
    assert stack.instances
    for instance in stack.instances:
        with pytest.raises(ProcessLookupError):
            os.killpg(instance.pid, 0)


async def test_the_servers_are_up_inside_and_gone_after(tmp_path: Path) -> None:
    async with build_stack(tmp_path, instances=2) as stack:
        assert [instance.id for instance in stack.instances] == ["a", "b"]
        assert stack.instance("b").url != stack.instance("a").url
        stack.require_running()

    assert_all_gone(stack)


async def test_a_killed_server_comes_back_under_its_id_and_port_while_another_is_dead(tmp_path: Path) -> None:
    async with build_stack(tmp_path, instances=2) as stack:
        before = stack.instance("b")
        for instance in stack.instances:
            os.killpg(instance.pid, signal.SIGKILL)

        after = await stack.restart("b")

        assert (after.id, after.url, after.log) == (before.id, before.url, before.log)
        assert after.process.command == before.process.command
        assert after.process.exit_status is None
        assert stack.instance("b") is after

    assert_all_gone(stack)


async def test_a_server_that_runs_is_replaced(tmp_path: Path) -> None:
    async with build_stack(tmp_path, instances=1) as stack:
        before = stack.instance("a")

        after = await stack.restart("a")

        assert before.process.exit_status is not None
        assert after.process.exit_status is None

    assert_all_gone(stack)


async def test_a_server_that_does_not_come_back_is_an_error_and_ends_with_the_stack(tmp_path: Path) -> None:
    stack = build_stack(tmp_path, instances=1)
    async with stack:
        stack._vllm_arguments.append("--fail")
        with pytest.raises(ProcessFailed, match="out of memory"):
            await stack.restart("a")

    assert_all_gone(stack)


async def test_each_stack_has_its_own_keys(tmp_path: Path) -> None:
    one, other = build_stack(tmp_path), build_stack(tmp_path)

    assert len({one.secret, other.secret, one.admin_key, other.admin_key, one.api_key, other.api_key}) == 6


async def test_a_server_that_dies_fails_the_start_with_the_end_of_its_log(tmp_path: Path) -> None:
    stack = build_stack(tmp_path, vllm_arguments=["--fail"])

    with pytest.raises(ProcessFailed, match=r"(?s)vLLM server [ab] ended with exit status 1.*out of memory"):
        await stack.__aenter__()

    assert_all_gone(stack)


async def test_a_start_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    stack = build_stack(tmp_path, vllm_arguments=["--hang"])
    start = asyncio.create_task(stack.__aenter__())
    while not stack.instances or "hanging" not in stack.instances[-1].log.read_text().splitlines():
        await asyncio.sleep(0.01)

    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start

    assert_all_gone(stack)


async def test_a_restart_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async with build_stack(tmp_path, instances=1) as stack:
        old = stack.instance("a")
        stack._vllm_arguments.append("--hang")
        restart = asyncio.create_task(stack.restart("a"))
        while stack.instance("a") is old:
            await asyncio.sleep(0.01)

        restart.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restart

    assert_all_gone(stack)


async def test_a_server_without_the_plugin_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    stack = build_stack(tmp_path, instances=1, vllm_arguments=["--without-plugin"])

    with pytest.raises(StackFailed, match="is the plugin loaded"):
        await stack.__aenter__()

    assert_all_gone(stack)


async def test_servers_that_never_get_ready_are_an_error_and_end(tmp_path: Path) -> None:
    stack = build_stack(tmp_path, instances=1, vllm_arguments=["--hang"], start_timeout_s=0.1)

    with pytest.raises(StackFailed, match="not ready after"):
        await stack.__aenter__()

    assert_all_gone(stack)


async def test_a_missing_model_is_an_error_that_says_how_to_make_it(tmp_path: Path) -> None:
    stack = Stack(gateway=False, model_directory=tmp_path / "none", log_directory=tmp_path)

    with pytest.raises(StackFailed, match="make model"):
        await stack.__aenter__()
