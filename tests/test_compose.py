"""The compose file's rules, without Docker. PyYAML comes with vLLM, so `make test` runs this."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gateway.config import FLAGS
from loadtest.stack import BLOCK_SIZE, MAX_MODEL_LENGTH

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "deploy" / "compose"
SECRETS = {"KVFERRY_SECRET", "KVFERRY_API_KEYS", "KVFERRY_ADMIN_KEY", "KVFERRY_REDIS_PASSWORD"}
ONE_SHOT = {"model"}

TEXT = (DIRECTORY / "compose.yaml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
DOCKERFILES: dict[str, str] = {
    service["image"]: (ROOT / str(service["build"]["dockerfile"])).read_text()
    for service in SERVICES.values()
    if "build" in service
}
INSTANCES = {name: service for name, service in SERVICES.items() if name.startswith("vllm-")}
every_service = pytest.mark.parametrize("name", SERVICES)


@every_service
def test_every_service_has_a_memory_limit_and_a_restart_policy(name: str) -> None:
    assert re.fullmatch(r"\d+[mg]", SERVICES[name]["mem_limit"])
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


def test_our_own_images_carry_the_version_of_the_project_and_are_built_once() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = [service for service in SERVICES.values() if service["image"].startswith("kvferry-")]
    assert {service["image"].partition(":")[2] for service in ours} == {version}
    assert {service["image"] for service in ours} == DOCKERFILES.keys()
    assert all(service.get("pull_policy") == "never" for service in ours if "build" not in service)


def test_secrets_come_from_the_environment_and_a_missing_one_is_refused() -> None:
    assert {name for name in SECRETS if f"${{{name}:?" in TEXT} == SECRETS
    variables = [variable for service in SERVICES.values() for variable in service.get("environment", {}).items()]
    assert all(value.startswith(f"${{{name}") for name, value in variables if name in SECRETS)
    example = dict(line.split("=", 1) for line in (DIRECTORY / ".env.example").read_text().splitlines() if "=" in line)
    assert {name for name, value in example.items() if not name.startswith("#") and not value} == SECRETS


def test_only_the_gateway_is_published() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["gateway"]


def test_the_gateway_knows_every_instance_and_only_settings_that_exist() -> None:
    environment = SERVICES["gateway"]["environment"]
    assert set(environment["KVFERRY_INSTANCES"].split(",")) == {f"http://{name}:8000" for name in INSTANCES}
    assert set(environment) <= {variable for _, variable, _, _ in FLAGS}


def test_the_instances_differ_in_name_and_are_reached_by_their_service() -> None:
    assert len({service["environment"]["KVFERRY_INSTANCE_ID"] for service in INSTANCES.values()}) == len(INSTANCES)
    for name, service in INSTANCES.items():
        assert service["environment"]["KVFERRY_ADVERTISE_HOST"] == name
        assert {f"--block-size={BLOCK_SIZE}", f"--max-model-len={MAX_MODEL_LENGTH}"} <= set(service["command"])
