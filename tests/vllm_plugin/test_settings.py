"""What the plugin asks of its environment, and what it says when it does not get it."""

from __future__ import annotations

import pytest

from vllm_plugin.settings import SettingsError, growth_tokens_from_environment, settings_from_environment


def test_settings_come_from_the_environment() -> None:
    settings = settings_from_environment(
        {"KVFERRY_SECRET": "s", "KVFERRY_INSTANCE_ID": "pod-1", "KVFERRY_ADVERTISE_HOST": "10.0.0.5"}
    )
    assert (settings.secret, settings.instance_id, settings.advertise_host) == ("s", "pod-1", "10.0.0.5")


def test_a_missing_secret_is_refused_with_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"KVFERRY_SECRET.*Set it to the same random string everywhere"):
        settings_from_environment({})


@pytest.mark.parametrize("instance_id", ["a b", "a/b", "ä", "x" * 129, "a\n"])
def test_an_instance_id_that_could_not_stand_in_a_stream_comment_is_refused(instance_id: str) -> None:
    with pytest.raises(SettingsError, match="KVFERRY_INSTANCE_ID"):
        settings_from_environment({"KVFERRY_SECRET": "s", "KVFERRY_INSTANCE_ID": instance_id})


def test_room_to_grow_can_be_set_and_a_wrong_number_is_refused_at_the_start() -> None:
    assert growth_tokens_from_environment({}) == 16
    assert growth_tokens_from_environment({"KVFERRY_GROWTH_TOKENS": "0"}) == 0
    for value in ("-1", "1.5", "many", "99999"):
        with pytest.raises(SettingsError, match="KVFERRY_GROWTH_TOKENS"):
            settings_from_environment({"KVFERRY_SECRET": "s", "KVFERRY_GROWTH_TOKENS": value})
