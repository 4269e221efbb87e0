"""Run the load test against whatever is up, and write a report (`make loadtest`).

python -m loadtest.load --rate 20 --run-time 2m --workload ShareGPT

Everything but --url and --reports is an option of Locust or of loadtest/locustfile.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

URL = "http://127.0.0.1:8080"
ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE_ENVIRONMENT = ROOT / "deploy" / "compose" / ".env"
REPORTS = ROOT / ".cache" / "loadtest"
DEFAULTS = ("--users", "4", "--run-time", "1m", "--stop-timeout", "120")
"""Given first, so that the same option later on the line counts."""
KEY_VARIABLE = "KVFERRY_API_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default=os.environ.get("KVFERRY_URL", URL), help=f"of the gateway (default {URL})")
    parser.add_argument("--reports", type=Path, default=REPORTS, help="where each run makes a directory for its report")
    given, others = parser.parse_known_args(arguments)
    if importlib.util.find_spec("locust") is None:
        print("error: Locust is not installed: pip install 'kvferry[loadtest]'", file=sys.stderr)
        return 1
    report = given.reports / time.strftime("%Y%m%d-%H%M%S")
    report.mkdir(parents=True, exist_ok=True)
    os.environ[KEY_VARIABLE] = api_key(os.environ, COMPOSE_ENVIRONMENT)
    command = locust_command(given.url, report, others)
    return become(command)


def become(command: Sequence[str]) -> NoReturn:
    """Signals then reach Locust itself, which ends its test and writes the report."""
    os.execv(command[0], list(command))  # noqa: S606


def locust_command(url: str, report: Path, others: Sequence[str]) -> list[str]:
    locustfile = Path(__file__).resolve().parent.parent / "locustfile.py"
    pages = ("--html", str(report / "locust.html"), "--report", str(report))
    return [
        *(sys.executable, "-m", "locust", "-f", str(locustfile), "--host", url),
        *("--headless", "--only-summary", "--spawn-rate", "100", *DEFAULTS, *pages, *others),
    ]


def api_key(environment: Mapping[str, str], compose_environment: Path) -> str:
    """The variable's; else the first of the compose stack's, if that is set up here; else none."""
    if key := environment.get(KEY_VARIABLE):
        return key.split(",")[0]
    try:
        lines = compose_environment.read_text().splitlines()
    except OSError:
        return ""
    found = [line.partition("=")[2] for line in lines if line.startswith("KVFERRY_API_KEYS=")]
    return found[-1].split(",")[0].strip() if found else ""


if __name__ == "__main__":
    sys.exit(main())
