"""Where settings come from, and what is said of a wrong one."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from gateway.cli.command import main
from gateway.config import FLAGS, Settings, add_flags, read_settings, read_values, settings_from, warn_of_unknown
from gateway.config_sources import FILE_FLAG, OTHERS, file_key, flag_attribute, unknown_variables
from gateway.errors import ConfigError
from tests.test_config import GOOD

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(arguments)


def written(directory: Path, text: str) -> str:
    path = directory / "kvferry.toml"
    path.write_text(text)
    return str(path)


def read(path: str, *arguments: str, **environment: str) -> Settings:
    return read_settings(flags("--config", path, *arguments), GOOD | environment)


def test_a_flag_comes_before_the_environment_before_the_file_before_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 7\nwaiters_max = 7\nlog_level = 'error'\n")
    settings = read(path, "--port", "9", KVFERRY_PORT="8", KVFERRY_WAITERS_MAX="8")
    assert (settings.port, settings.limits.waiters, settings.log_level, settings.workers) == (9, 8, "error", 1)
    assert read_settings(flags(), GOOD | {"KVFERRY_CONFIG": path}).port == 7


def test_a_file_may_hold_all_settings_in_tomls_own_types(tmp_path: Path) -> None:
    text = """
        secret = "s"
        instances = ["http://a", "http://b"]
        api_keys = "k1,k2"
        caps = { n = 4, stop = 2 }
        send_priority = false
        instance_wait_s = 0
        event_gap_timeout_s = 7.5
        port = "81"
    """
    settings = read_settings(flags("--config", written(tmp_path, text)), {})
    assert (settings.secret, settings.instance_urls) == ("s", ("http://a", "http://b"))
    assert settings.api_keys == ("k1", "k2")
    assert (settings.caps.n, settings.caps.stop, settings.sends_priority) == (4, 2, False)
    assert (settings.budgets.instance_wait_s, settings.budgets.event_gap_s, settings.port) == (0.0, 7.5, 81)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("prot = 1", "prot is not a setting (did you mean port?)"),
        ("redis-url = ''", "redis-url is not a setting (did you mean redis_url?)"),
        ("KVFERRY_PORT = 1", "KVFERRY_PORT is not a setting (did you mean port?)"),
        ("prot = 1\nxyzzy = 2", "(did you mean port?); xyzzy is not a setting."),
        ("[gateway]\nport = 1", "gateway is not a setting"),
        ("port = ", "is not TOML"),
        ("port = [1]", "port in {path} must be a number"),
        ("port = 1.5", "port in {path} must be a whole number, not '1.5'"),
        ("port = 70000", "port in {path} must be between 0 and 65535, not 70000"),
        ("port = true", "port in {path} must be a number"),
        ("log_level = 1", "log_level in {path} must be a string"),
        ("send_priority = 1", "send_priority in {path} must be true or false"),
        ("instances = [1]", "instances in {path} must be an array"),
        ("caps = { n = 'many' }", "caps in {path} must be a table of whole numbers"),
        ("caps = { m = 1 }", "caps in {path}: m is no cap"),
        ("low_freeness_steps = 999", "low_freeness_steps in {path} must not be above KVFERRY_HIGH_FREENESS_STEPS"),
        ("keys_file = '/nowhere'", "keys_file in {path} cannot be read"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_its_key_and_the_file(line: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{line}\n")
    environment = {key: value for key, value in GOOD.items() if not line.startswith(file_key(key))}
    with pytest.raises(ConfigError) as error:
        read_settings(flags("--config", path), environment)
    assert says.format(path=path) in error.value.message
    assert path in error.value.message


def test_a_wrong_setting_is_named_by_the_flag_or_the_variable_that_it_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 7\n")
    with pytest.raises(ConfigError, match=r"^--port must be between"):
        read(path, "--port", "70000", KVFERRY_PORT="70001")
    with pytest.raises(ConfigError, match=r"^KVFERRY_PORT must be between"):
        read(path, KVFERRY_PORT="70001")
    with pytest.raises(ConfigError, match=r"^KVFERRY_SECRET \(--secret\) is missing"):
        read_settings(flags(), {})


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: row[1])
def test_every_setting_can_be_set_in_the_file_and_says_so_when_it_is_of_no_possible_type(
    row: tuple[str, str, str, str], tmp_path: Path
) -> None:
    key = file_key(row[1])
    assert (f"--{key.replace('_', '-')}", flag_attribute(row[0])) == (row[0], key), "one name, in three spellings"
    with pytest.raises(ConfigError, match=f"^{key} in "):
        read(written(tmp_path, f"{key} = 1979-05-27\n"))


def test_a_file_that_is_not_there_is_named_with_the_setting_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config: .*none.toml cannot be read: No such file"):
        read(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"^KVFERRY_CONFIG: .*cannot be read"):
        read_settings(flags(), GOOD | {"KVFERRY_CONFIG": str(tmp_path)})


def test_check_prints_a_file_that_says_the_same_without_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        name: f"hush-{index}"
        for index, name in enumerate(
            ("SECRET", "ADMIN_KEY", "API_KEYS", "UPSTREAM_API_KEY", "METRICS_KEY"),
        )
    }
    monkeypatch.setenv("KVFERRY_REDIS_URL", "redis://user:hush@redis:6379/0?password=hush")
    for name, value in secrets.items():
        monkeypatch.setenv(f"KVFERRY_{name}", value)
    path = written(tmp_path, "instances = ['http://a']\ncaps = { n = 4 }\nsend_priority = false\nwaiters_max = 9\n")
    assert main(["serve", "--config", path, "--check", "--total-timeout-s", "1e3"]) == 0
    printed = capsys.readouterr().out
    assert "hush" not in printed
    for line in (
        rf"waiters_max = 9 +# waiters_max in {re.escape(path)}",
        r"total_timeout_s = 1000.0 +# --total-timeout-s",
        r"port = 8000 +# default",
        r"# secret is hidden +# KVFERRY_SECRET",
        r'# redis_url = "redis://\*\*\*@redis:6379/0\?password=\*\*\*"  # KVFERRY_REDIS_URL',
    ):
        assert re.search(f"^{line}$", printed, re.MULTILINE), (line, printed)
    environment = {f"KVFERRY_{name}": value for name, value in secrets.items()}
    environment["KVFERRY_REDIS_URL"] = "redis://user:hush@redis:6379/0?password=hush"
    again = read_settings(flags("--config", written(tmp_path, printed)), environment)
    before = {**environment, "KVFERRY_INSTANCES": "http://a", "KVFERRY_CAPS": "n=4", "KVFERRY_SEND_PRIORITY": "off"}
    before |= {"KVFERRY_WAITERS_MAX": "9", "KVFERRY_TOTAL_TIMEOUT_S": "1000"}
    assert again == read_settings(flags(), before)


def test_check_refuses_what_serve_refuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (GOOD | {"KVFERRY_PORT": "no"}).items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--check"]) == 2
    assert capsys.readouterr() == ("", "kvferry: KVFERRY_PORT must be a whole number, not 'no'.\n")


def test_the_default_settings_print_as_toml() -> None:
    values = read_values(flags(), GOOD)
    assert tomllib.loads(values.to_toml())["port"] == 8000
    assert settings_from(values) == read_settings(flags(), GOOD)


def test_the_pages_file_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    settings = read_settings(flags("--config", written(tmp_path, text)), {"KVFERRY_SECRET": "s"})
    assert (settings.port, settings.caps.n, settings.sends_priority, settings.budgets.total_s) == (
        8080,
        16,
        False,
        3600,
    )


def test_the_page_has_a_line_for_every_setting_and_none_for_what_is_none() -> None:
    """With the default as it is in the code."""
    part = PAGE.read_text().split("\n## Gateway\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(KVFERRY_[A-Z0-9_]+)` \| ([^|]*) \| [^|]+ \|$", part, re.MULTILINE))
    known = {variable: default for _, variable, default, _ in (FILE_FLAG, *FLAGS)}
    assert set(rows) == set(known)
    for variable, default in known.items():
        shown = rows[variable].strip()
        assert shown == f"`{default}`" if default else shown in ("", "none", "required"), variable


def test_a_variable_that_nobody_reads_is_told_with_the_one_that_may_have_been_meant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kubernetes = (
        "KVFERRY_SERVICE_HOST",
        "KVFERRY_SERVICE_PORT_HTTP",
        "KVFERRY_PORT_8000_TCP_ADDR",
        "KVFERRY_REDIS_PORT",
    )
    known = {variable for _, variable, _, _ in FLAGS} | {*OTHERS, *kubernetes, "PATH"}
    unknown = {"KVFERRY_INSTANCE": "KVFERRY_INSTANCES", "KVFERRY_AMIN_KEY": "KVFERRY_ADMIN_KEY", "KVFERRY_COLOUR": None}
    unknown["KVFERRY_WORKER"] = "KVFERRY_WORKERS"
    environment = dict.fromkeys([*known, *unknown], "a-secret")
    assert unknown_variables(FLAGS, environment) == sorted(unknown.items())
    warn_of_unknown(environment)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "unknown_variable name=KVFERRY_AMIN_KEY meant=KVFERRY_ADMIN_KEY",
        "unknown_variable name=KVFERRY_COLOUR",
        "unknown_variable name=KVFERRY_INSTANCE meant=KVFERRY_INSTANCES",
        "unknown_variable name=KVFERRY_WORKER meant=KVFERRY_WORKERS",
    ]


def test_every_variable_that_is_documented_is_known() -> None:
    documented = dict.fromkeys(re.findall(r"^\| `(KVFERRY_[A-Z0-9_]+)`", PAGE.read_text(), re.MULTILINE), "")
    assert len(documented) > 30
    assert unknown_variables(FLAGS, documented) == []
