"""Imports go one way."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import gateway

PACKAGE = Path(gateway.__file__).parent
LAYERS = {
    # What each part of the gateway may import of it.
    "policy": {"policy"},
    "openai": {"openai", "wire", "errors"},
    "cluster": {"cluster", "policy", "wire", "errors", "connection", "telemetry", "counters"},
    "serving": {
        *("serving", "openai", "cluster", "policy", "wire", "errors"),
        *("connection", "telemetry", "config", "counters", "tracing"),
    },
    "cli": {
        *("cli", "access", "app", "config", "errors", "keys_file", "server"),
        *("telemetry", "version", "wire", "workers"),
    },
    "dashboard": {
        *("dashboard", "scheduler", "serving", "cluster", "policy", "wire", "errors"),
        *("counters", "routes", "telemetry", "version"),
    },
    "scheduler": {"scheduler", "cluster", "policy", "wire", "errors", "telemetry", "counters"},
    "config_sources": {"errors"},
    "requests": {"cluster", "serving", "policy", "errors", "telemetry"},
    "gateways": {"cluster", "wire", "errors"},
    "connection": set[str](),
    "wire": set[str](),
    "errors": set[str](),
    "counters": set[str](),
    "telemetry": {"counters"},
    "tracing": set[str](),
    "otel": {"tracing"},
}


def imports(path: Path) -> set[str]:
    """Dotted names, with what is taken from a package of ours as part of them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: a relative import"
            inner = node.module.split(".")[0] == "gateway"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if inner else {node.module}
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_the_gateway_imports_none_of_its_neighbours() -> None:
    for path in files():
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"vllm", "vllm_plugin", "loadtest", "tests", "torch"}, path


def test_each_part_imports_only_what_lies_below_it() -> None:
    seen: set[str] = set()
    for path in files():
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in LAYERS:
            continue
        seen.add(part)
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("gateway.")}
        assert ours <= LAYERS[part], path
    assert seen == set(LAYERS)


def test_policy_wire_and_formats_need_the_standard_library_alone() -> None:
    for path in files():
        if path.relative_to(PACKAGE).parts[0] in ("policy", "openai", "wire.py"):
            roots = {name.split(".")[0] for name in imports(path)}
            assert roots <= sys.stdlib_module_names | {"gateway"}, path


def test_one_file_each_speaks_to_redis_and_to_the_instances() -> None:
    names = ("redis", "httptools", "httpx", "fastapi", "prometheus_client", "opentelemetry", "rich")
    importers: dict[str, set[str]] = {name: set() for name in names}
    for path in files():
        for name in imports(path):
            importers.get(name.split(".")[0], set()).add(str(path.relative_to(PACKAGE)))
    assert importers == {
        "redis": {"cluster/store.py"},
        "httptools": {"connection.py", "request_parser.py"},
        "httpx": {"cluster/llumlet.py", "cli/client.py"},
        "fastapi": {"admin.py", "app.py"},
        "prometheus_client": {"metrics.py", "cluster/plain.py"},
        "opentelemetry": {"otel.py"},
        "rich": {"cli/output.py"},
    }


ROOT = PACKAGE.parent


def test_the_plugin_and_the_load_tests_know_the_gateway_only_by_its_messages_and_its_policy() -> None:
    for path in [*ROOT.glob("vllm_plugin/*.py"), *ROOT.glob("loadtest/**/*.py")]:
        ours = {name for name in imports(path) if name.split(".")[0] == "gateway"}
        if path.name not in WHOLE_GATEWAYS:
            assert all(name.split(".")[1] in ("wire", "policy") for name in ours), path
        if path.parent.name != "vllm_plugin":
            plugins = {name for name in imports(path) if name.split(".")[0] == "vllm_plugin"}
            assert plugins <= (WITHOUT_VLLM if path.parent.name == "fake_vllm" else set()), path


WHOLE_GATEWAYS = {"deciding_gateway.py"}
"""What is a gateway itself: a process of a benchmark that asks one for decisions faster than HTTP could."""
WITHOUT_VLLM = {"vllm_plugin.handshake", "vllm_plugin.pairing", "vllm_plugin.settings"}
"""What the fake instances take from the plugin, so that both speak the same handshake with the same limits."""


def test_what_the_fakes_take_from_the_plugin_needs_no_vllm() -> None:
    for name in WITHOUT_VLLM:
        path = ROOT / f"{name.replace('.', '/')}.py"
        roots = {part.split(".")[0] for part in imports(path)}
        assert roots <= sys.stdlib_module_names | {"aiohttp", "gateway", "vllm_plugin"}, path
        assert {part for part in imports(path) if part.startswith("vllm_plugin")} <= WITHOUT_VLLM, path


def test_the_engine_model_has_no_clock_and_no_dice() -> None:
    """The simulator gives it both; so a run repeats to the byte."""
    for path in ROOT.glob("loadtest/sim/*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"time", "datetime", "asyncio", "secrets", "uuid"}, path


def test_one_module_alone_names_what_is_vllms() -> None:
    importers = {
        path.name
        for path in ROOT.glob("vllm_plugin/*.py")
        if {"vllm", "torch"} & {name.split(".")[0] for name in imports(path)}
    }
    assert importers <= {"compat.py", *TYPES_ONLY}
    for name in TYPES_ONLY:
        text = (ROOT / "vllm_plugin" / name).read_text()
        assert text.count("from vllm.") == text.split("if TYPE_CHECKING:")[1].split("\n\n")[0].count("from vllm.")


TYPES_ONLY = {"engine.py"}
"""They name a type of vLLM's in annotations, which nothing imports at run time."""
