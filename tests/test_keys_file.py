"""The file of keys, and the command that makes one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.access import Keys
from gateway.errors import ConfigError, Unauthorized
from gateway.keys_file import KeysFile, read_keys_file
from gateway.policy.limits import KeyLimits
from gateway.wire import PriorityClass
from tests.test_config import read

SHA = "a" * 64


def written(path: Path, text: str) -> str:
    file = path / "keys.toml"
    file.write_text(text)
    return str(file)


def removed(path: str) -> None:
    Path(path).unlink()


def test_a_key_that_the_command_makes_opens_the_gateway_and_stands_in_the_file_as_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--requests-per-minute", "60", "--concurrent-requests", "4", "--priority", "normal"]
    assert main(["keys", "new", "alice", *limits]) == 0
    assert main(["keys", "new", "b.o:b"]) == 0
    out, err = capsys.readouterr()
    alice, bob = (line for line in err.splitlines() if line.startswith("kvf-"))
    assert alice not in out
    assert hashlib.sha256(alice.encode()).hexdigest() in out
    named = read_keys_file(written(tmp_path, out))
    keys = Keys([], named, open_if_empty=True)
    found = keys.check([(b"authorization", f"Bearer {alice}".encode())])
    assert (found.name, found.priority_max) == ("alice", PriorityClass.NORMAL)
    assert found.limits == KeyLimits(requests_per_minute=60, concurrent_requests=4)
    other = keys.check([(b"authorization", f"bearer {bob}".encode())])
    assert (other.name, other.limits, other.priority_max) == ("b.o:b", None, PriorityClass.HIGH)
    for wrong in (alice[:-1], alice + "x", hashlib.sha256(alice.encode()).hexdigest(), ""):
        with pytest.raises(Unauthorized):
            keys.check([(b"authorization", f"Bearer {wrong}".encode())])


def test_a_name_that_is_taken_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of a name are no TOML, and the next gateway would not start."""
    path = written(tmp_path, f'[keys."alice"]\nsha256 = "{SHA}"\n')
    for arguments, variable in ((["--keys-file", path], ""), ([], path)):
        monkeypatch.setenv("KVFERRY_KEYS_FILE", variable)
        assert main(["keys", "new", "alice", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert f"a key `alice` in {path} already" in err
        assert main(["keys", "new", "bob", *arguments]) == 0
        capsys.readouterr()
    assert main(["keys", "new", "alice", "--keys-file", str(tmp_path / "none")]) == 0
    assert main(["keys", "new", "alice", "--keys-file", written(tmp_path, "x")]) == 2


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="the system does not say what a file is that is written to"
)
def test_a_name_is_not_appended_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    command = [sys.executable, "-m", "gateway", "keys", "new"]
    for name, status in (("alice", 0), ("bob", 0), ("alice", 1)):
        with path.open("a") as file:
            assert (
                subprocess.run([*command, name], stdout=file, stderr=subprocess.DEVNULL, check=False).returncode
                == status
            )
    assert {key.name for key in read_keys_file(str(path))} == {"alice", "bob"}


async def test_a_file_that_changes_is_read_again_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    def opens(key: bytes) -> bool:
        try:
            keys.check([(b"authorization", b"Bearer " + key)])
        except Unauthorized:
            return False
        return True

    one, two = (f'[keys.{key}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n' for key in ("one", "two"))
    path = written(tmp_path, one)
    keys = Keys([], read_keys_file(path), open_if_empty=True)
    file = KeysFile(path, keys)
    await file.look()
    assert (opens(b"one"), opens(b"two")) == (True, False)
    written(tmp_path, one + two)
    await file.look()
    assert (opens(b"one"), opens(b"two")) == (True, True)
    for wrong in ("", "x = "):
        written(tmp_path, wrong)
        await file.look()
        assert (opens(b"one"), opens(b"two")) == (True, True)
    removed(path)
    await file.look()
    assert opens(b"two")
    written(tmp_path, two)
    await file.look()
    assert (opens(b"one"), opens(b"two"), opens(b"")) == (False, True, False)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = ", "not TOML"),
        ("", "no key in it"),
        ("[keys]", "no key in it"),
        ("keys = 3", "no key in it"),
        ("[key.a]", "key is not known"),
        ("[keys]\na = 3", "keys.a must be a table"),
        ("[keys.a]", "keys.a.sha256"),
        ('[keys.a]\nsha256 = "secret"', "keys.a.sha256"),
        (f'[keys.a]\nsha256 = "{"g" * 64}"', "keys.a.sha256"),
        (f'[keys.a]\nsha256 = "{SHA}"\nrpm = 3', "keys.a.rpm is not known"),
        (f'[keys.a]\nsha256 = "{SHA}"\nrequests_per_minute = 0', "keys.a.requests_per_minute"),
        (f'[keys.a]\nsha256 = "{SHA}"\ntokens_per_minute = "9"', "keys.a.tokens_per_minute"),
        (f'[keys.a]\nsha256 = "{SHA}"\ntokens_per_minute = 1.5', "keys.a.tokens_per_minute"),
        (f'[keys.a]\nsha256 = "{SHA}"\nconcurrent_requests = true', "keys.a.concurrent_requests"),
        (f'[keys.a]\nsha256 = "{SHA}"\npriority = "urgent"', "keys.a.priority"),
        (f'[keys."a b"]\nsha256 = "{SHA}"', "keys.a b"),
        (f'[keys.a]\nsha256 = "{SHA}"\n[keys.b]\nsha256 = "{SHA.upper()}"', "same sha256"),
    ],
)
def test_a_wrong_field_of_the_file_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match="KVFERRY_KEYS_FILE") as refusal:
        read(KVFERRY_KEYS_FILE=path)
    assert named in refusal.value.message
    assert path in refusal.value.message


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVFERRY_KEYS_FILE"):
        read(KVFERRY_KEYS_FILE=str(tmp_path / "none"))


def test_a_file_of_keys_allows_more_than_loopback(tmp_path: Path) -> None:
    path = written(tmp_path, f'[keys.a]\nsha256 = "{SHA}"')
    assert read(KVFERRY_HOST="0.0.0.0", KVFERRY_KEYS_FILE=path).named_keys[0].name == "a"


def test_the_command_names_a_field_that_the_file_could_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "a b"]) == 2
    assert "keys.a b" in capsys.readouterr().err
    assert main(["keys", "new", "a", "--tokens-per-minute", "0"]) == 2
    out, err = capsys.readouterr()
    assert "keys.a.tokens_per_minute" in err
    assert out == ""
    assert "kvf-" not in err


@pytest.mark.parametrize(
    ("name", "value"),
    [("KVFERRY_CAPS", "n=many"), ("KVFERRY_CAPS", "tokens=3"), ("KVFERRY_SEND_PRIORITY", "maybe")],
)
def test_a_wrong_bound_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read(**{name: value})
