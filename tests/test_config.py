"""Settings and the command."""

from __future__ import annotations

import argparse

import pytest

from gateway.__main__ import main
from gateway.config import Settings, add_flags, read_settings
from gateway.errors import ConfigError
from gateway.policy.picking import PickRules
from gateway.policy.policies import POLICIES
from gateway.policy.waiting import GROWTH_TOKENS
from gateway.wire import PriorityClass

GOOD = {"KVFERRY_SECRET": "s", "KVFERRY_INSTANCES": "http://127.0.0.1:8001/, http://127.0.0.1:8002"}


def read(*flags: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_settings(parser.parse_args(flags), GOOD | environment)


def test_flags_come_before_the_environment() -> None:
    assert read().instance_urls == ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    assert read("--port", "9", KVFERRY_PORT="8").port == 9
    assert read(KVFERRY_PORT="8").port == 8
    assert read(KVFERRY_API_KEYS="a, b,").api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVFERRY_SECRET", ""),
        ("KVFERRY_INSTANCES", ""),
        ("KVFERRY_INSTANCES", "127.0.0.1:8001"),
        ("KVFERRY_INSTANCES", "http://a,http://a"),
        ("KVFERRY_PORT", "eight"),
        ("KVFERRY_PORT", "70000"),
        ("KVFERRY_REDIS_URL", "http://x"),
        ("KVFERRY_LOG_LEVEL", "loud"),
        ("KVFERRY_LOG_FORMAT", "xml"),
        ("KVFERRY_TRACING", "on"),
        ("KVFERRY_POLICY", "both"),
        ("KVFERRY_LOW_FREENESS_STEPS", "many"),
        ("KVFERRY_LOW_FREENESS_STEPS", "9999"),
        ("KVFERRY_MOVES_AT_ONCE", "5"),
        ("KVFERRY_MOVES_MAX", "0"),
        ("KVFERRY_COOL_DOWN_S", "-1"),
        ("KVFERRY_TARGET_LOADS", "urgent=1600"),
        ("KVFERRY_TARGET_LOADS", "high=1,high=2"),
        ("KVFERRY_TARGET_LOADS", "high"),
        ("KVFERRY_TARGET_LOADS", "high=-1"),
        ("KVFERRY_TOTAL_TIMEOUT_S", "0"),
        ("KVFERRY_EVENT_GAP_TIMEOUT_S", "inf"),
        ("KVFERRY_HANG_TIMEOUT_S", "nan"),
        ("KVFERRY_SHUTDOWN_GRACE_S", "-1"),
        ("KVFERRY_LATE_BINDING", "perhaps"),
        ("KVFERRY_REQUESTS_PER_INSTANCE_MAX", "1.5"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read(**{name: value})


def test_every_budget_can_be_set_and_some_may_be_zero() -> None:
    assert read() == Settings("s", read().instance_urls)
    settings = read("--event-gap-timeout-s", "7", KVFERRY_QUEUE_PER_INSTANCE_MAX="9", KVFERRY_INSTANCE_WAIT_S="0")
    assert (settings.budgets.event_gap_s, settings.budgets.instance_wait_s) == (7.0, 0.0)
    assert settings.limits.queue_per_instance == 9
    settings = read(KVFERRY_LATE_BINDING="off", KVFERRY_ROOM_WAIT_S="12", KVFERRY_AGED_AFTER_S="3")
    assert (settings.late_binding, settings.budgets.room_wait_s, settings.waiting.aged_s) == (False, 12.0, 3.0)


def test_the_policy_is_the_one_that_the_simulator_calls_so() -> None:
    for settings, named in ((read(), "kvferry"), (read(KVFERRY_POLICY="llumnix"), "llumnix")):
        expected = POLICIES[named]
        assert (settings.policy, settings.picking) == (expected.leader.policy, expected.picking)
        assert (settings.moves_at_once, settings.waiting) == (expected.moves_at_once, expected.waiting)
        assert settings.migration == expected.leader.migration
    assert POLICIES["kvferry"].growth_tokens == GROWTH_TOKENS
    own = read(KVFERRY_COOL_DOWN_S="0", KVFERRY_MOVES_MAX="7", KVFERRY_MOVES_AT_ONCE="1")
    assert (own.picking, own.moves_at_once) == (PickRules(cool_down_s=0.0, moves_max=7), 1)


def test_each_class_may_have_a_target_load_if_servers_are_told_the_class() -> None:
    assert read(KVFERRY_TARGET_LOADS="high=1600, low = 90000").target_loads == {
        PriorityClass.HIGH: 1600,
        PriorityClass.LOW: 90_000,
    }
    with pytest.raises(ConfigError, match="KVFERRY_SEND_PRIORITY"):
        read(KVFERRY_TARGET_LOADS="high=1600", KVFERRY_SEND_PRIORITY="off")


def test_without_keys_only_loopback_is_listened_on() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        assert read(KVFERRY_HOST=host).host == host
    for host in ("0.0.0.0", "10.0.0.1", "example.com", "::"):
        with pytest.raises(ConfigError, match="KVFERRY_API_KEYS"):
            read(KVFERRY_HOST=host)
        assert read(KVFERRY_HOST=host, KVFERRY_API_KEYS="k").host == host


def test_the_command_says_its_version_and_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvferry ")
    monkeypatch.delenv("KVFERRY_SECRET", raising=False)
    assert main(["serve"]) == 2
    assert "KVFERRY_SECRET" in capsys.readouterr().err
    assert main([]) == 2
