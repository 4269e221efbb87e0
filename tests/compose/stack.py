"""A compose project of its own, brought up with fake vLLM servers on free ports, and what a test does to it.

KVFERRY_COMPOSE_WITHOUT=grafana leaves services out whose images cannot be had.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from loadtest.processes import free_port

FILE = Path(__file__).resolve().parent.parent.parent / "deploy" / "compose" / "compose.yaml"
SERVICES = ("redis", "vllm", "gateway", "balancer", "prometheus", "grafana")
SECRETS = ("SECRET", "API_KEYS", "ADMIN_KEY", "METRICS_KEY", "REDIS_PASSWORD", "GRAFANA_PASSWORD")
COMMAND_TIMEOUT_S = 900.0
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Keys:
    api: str
    admin: str


class Stack:
    """``with Stack(directory) as stack``: built and up, with one vLLM server; taken down with its volumes."""

    def __init__(self, directory: Path) -> None:
        self.project = f"kvferry-test-{secrets.token_hex(4)}"
        values = {f"KVFERRY_{name}": secrets.token_hex(16) for name in SECRETS}
        ports = {name: str(free_port()) for name in ("PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
        self.url = f"http://127.0.0.1:{ports['PORT']}"
        self.prometheus_url = f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}"
        self.keys = Keys(values["KVFERRY_API_KEYS"], values["KVFERRY_ADMIN_KEY"])
        self._environment_file = directory / "compose.env"
        lines = {**values, **{f"KVFERRY_{name}": port for name, port in ports.items()}, "KVFERRY_PROFILE": "fake"}
        self._environment_file.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        left_out = os.environ.get("KVFERRY_COMPOSE_WITHOUT", "").split(",")
        self.services = [name for name in SERVICES if name not in left_out]
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def __enter__(self) -> Self:
        try:
            self.compose("build")  # The load test is in the image of the fake servers.
            self.scale(vllm=1)
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def _down(self) -> None:
        self.http.close()
        self.compose("--profile", "load", "down", "--volumes", "--remove-orphans", "--timeout", "1")

    def compose(self, *arguments: str) -> str:
        files = ("-p", self.project, "-f", str(FILE), "--env-file", str(self._environment_file))
        return docker("compose", *files, *arguments)

    def scale(self, **replicas: int) -> None:
        """Up, with so many of each; waits until all are healthy."""
        scales = [part for name, count in replicas.items() for part in ("--scale", f"{name}={count}")]
        self.compose("up", "--detach", "--wait", "--no-build", *scales, *self.services)

    def containers(self, service: str) -> list[str]:
        """Short ids, which are the containers' host names."""
        return [one[:12] for one in self.compose("ps", "--quiet", service).split()]

    def admin(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys.admin}"}
        response = self.http.request(method, path, headers=headers, **arguments)
        assert response.status_code == 200, response.text
        return response.json()

    def usable(self) -> set[str]:
        """Ids of the servers that the gateway behind the balancer would send a request to."""
        return set(self.lives())

    def lives(self) -> dict[str, str]:
        """The same, each with its boot id."""
        listed = self.admin("GET", "/admin/instances")["instances"]
        return {one["id"]: one["boot_id"] for one in listed if one["healthy"] and not one["draining"]}

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")


def docker(*arguments: str, may_fail: bool = False) -> str:
    done = subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=_without_settings(os.environ),
    )
    assert may_fail or done.returncode == 0, (
        f"docker {' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def has_engine() -> bool:
    try:
        found = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60)
        answers = subprocess.run(["docker", "info"], capture_output=True, timeout=60)
    except OSError:
        return False
    return found.returncode == 0 and answers.returncode == 0


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What a developer has set for a gateway of their own is not for this one."""
    return {name: value for name, value in environment.items() if not name.startswith("KVFERRY_")}


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Counted in looks and not by the clock: small machines stand still for seconds."""
    for _ in range(round(timeout_s / LOOK_S)):
        if condition():
            return
        time.sleep(LOOK_S)
    assert condition(), f"still not so after {timeout_s} s"


class Load:
    """The load test in a container of the project, until it is told to end. ``result``: what its report says."""

    def __init__(self, stack: Stack, directory: Path, *options: str) -> None:
        self._stack = stack
        self._directory = directory
        self.name = f"{stack.project}-load-run"
        stack.compose("run", "--detach", "--no-deps", "--name", self.name, "load", "--run-time", "20m", *options)

    def end(self) -> dict[str, Any]:
        """Reads what is under way to its end."""
        docker("stop", "--time", "150", self.name)
        docker("cp", f"{self.name}:/reports", str(self._directory))
        log = docker("logs", self.name)
        docker("rm", self.name)
        (path,) = self._directory.glob("reports/*/result.json")
        result: dict[str, Any] = json.loads(path.read_text())
        assert (path.parent / "report.html").read_text().count("<svg") == 1, log
        return result
