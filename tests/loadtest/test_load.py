"""The load test: what it sends, what it holds against a stream, what it reports."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from loadtest.load.__main__ import api_key, locust_command
from loadtest.load.journal import Journal, Stream
from loadtest.load.report import write
from loadtest.load.request import Endpoint, body
from loadtest.load.stream import Reading, refusal
from loadtest.workloads.supply import NAMES, RECORDED, Fit, supply
from loadtest.workloads.workload import DATA, Arrival, WorkloadError, read_trace

DONE = b"data: [DONE]\n\n"


def event(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "text": text or "", "finish_reason": finish}] if text or finish else []
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = event(usage={"prompt_tokens": 1, "completion_tokens": 2})
WHOLE = [event("a"), event("b", finish="length"), USAGE, DONE]


def read(events: list[bytes], tokens: int = 2) -> Reading:
    reading = Reading(0.0, tokens)
    for number, one in enumerate(events, 1):
        reading.take(one, float(number))
    return reading


def test_a_whole_stream_is_whole_and_tells_its_times() -> None:
    reading = read([b": a comment\n\n", *WHOLE])
    assert reading.verdict() is None
    assert (reading.first_at, reading.gaps_s) == (2.0, [1.0])


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ([event("a"), USAGE, DONE], "no finish"),
        (WHOLE[:3], "no [DONE]"),
        ([*WHOLE[:2], DONE], "no usage"),
        ([event("a", finish="length"), event(usage={"completion_tokens": 1}), DONE], "short read"),
        ([event("a"), event(error={"code": "leg_cut", "message": "gone"}), DONE], "error event: leg_cut"),
        ([*WHOLE[:2], event("c"), *WHOLE[2:]], "output after the finish"),
        ([*WHOLE, event("c")], "events after [DONE]"),
        ([WHOLE[0], b"<html>\n\n"], "not an event"),
        ([WHOLE[0][:20]], "not an event"),
        ([], "no finish"),
    ],
)
def test_a_stream_that_is_not_whole_is_broken(events: list[bytes], verdict: str) -> None:
    assert read(events).verdict() == verdict


def test_the_first_thing_that_was_wrong_is_the_one_that_is_told() -> None:
    reading = read([event(error={"type": "overloaded"})])
    reading.cut("ConnectionResetError")
    assert reading.verdict() == "error event: overloaded"
    assert refusal(503, b'{"error": {"code": "no_instance"}}') == "HTTP 503: no_instance"
    assert refusal(502, b"<html>") == "HTTP 502"


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_has_no_end_and_comes_at_its_rate(name: str) -> None:
    count = len(read_trace(DATA / f"{name}.csv")) if name in RECORDED else 2_000
    arrivals = list(itertools.islice(supply(name, rate_rps=50.0, seed=3, high_priority_share=0.2), count + 500))
    times = [one.at_s for one in arrivals]
    assert times == sorted(times)
    assert times[count] - times[0] == pytest.approx(count / 50, rel=0.1)
    assert sum(one.priority for one in arrivals) == pytest.approx(0.2 * len(arrivals), rel=0.2)
    kinds = len({(one.prompt_tokens, one.output_tokens) for one in arrivals[-500:]})
    assert kinds == 1 if name == "alike" else kinds > 50


def test_a_workload_that_there_is_none_of_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(WorkloadError, match="no workload 'X'"):
        supply("X", rate_rps=1.0, seed=1)
    with pytest.raises(WorkloadError, match="rate"):
        supply("azure2023_conv", rate_rps=0.0, seed=1)


@pytest.mark.parametrize(("prompt", "output", "fitted"), [(100, 50, (50, 25)), (900, 50, (75, 25)), (9, 900, (1, 99))])
def test_what_the_model_cannot_take_gets_a_shorter_prompt_first(
    prompt: int, output: int, fitted: tuple[int, int]
) -> None:
    fit = Fit(length_scale=0.5, tokens_max=100).apply(Arrival(0.0, prompt, output))
    assert (fit.prompt_tokens, fit.output_tokens) == fitted


def test_the_traces_ship_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["loadtest.workloads"]
    assert set(DATA.parent.glob(pattern)) == set(DATA.iterdir())


def test_a_request_asks_for_exactly_what_the_workload_says() -> None:
    asked = body(Arrival(0.0, 30, 7), Endpoint.COMPLETIONS, "m", random.Random(1))
    assert len(asked["prompt"]) == 30
    assert (asked["max_tokens"], asked["ignore_eos"], asked["stream"]) == (7, True, True)
    text = body(Arrival(0.0, 30, 7), Endpoint.CHAT, "m", random.Random(1))["messages"][0]["content"]
    assert len(text.split()) == 30


def journal() -> Journal:
    filled = Journal()
    for number in range(200):
        wrong = "short read" if number == 7 else None
        stream = Stream(number / 10, number % 2, 10, 3, 0.0, number / 10 + 1, 0.1 + number / 1000, 0.05, wrong)
        filled.add(stream, [0.02, 0.05], 3)
    return filled


def test_the_figures_count_what_was_broken_and_leave_its_times_out() -> None:
    figures = journal().figures()
    assert (figures["streams"], figures["broken"], figures["failures"]) == (200, 1, {"short read": 1})
    assert figures["ttft_ms"]["max"] == 299
    assert figures["token_gap_ms"]["p50"] == pytest.approx(20, rel=0.02)
    assert figures["token_gap_ms"]["max"] == pytest.approx(50, rel=0.02)
    assert figures["sent_per_s"] == 10
    assert figures["ttft_ms_by_priority"].keys() == {"1", "0"}
    assert Journal().figures()["ttft_ms"] is None


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="no matplotlib")
def test_the_report_has_its_plots_and_its_figures(tmp_path: Path) -> None:
    page = write(journal(), {"host": "<b>"}, tmp_path).read_text()
    assert page.count("<svg") == 1
    assert "<b>" not in page
    assert json.loads((tmp_path / "result.json").read_text())["broken"] == 1


def test_a_report_of_nothing_is_written_too(tmp_path: Path) -> None:
    write(Journal(), {}, tmp_path)


def test_the_key_is_the_variables_and_else_that_of_the_compose_stack(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    assert api_key({}, file) == ""
    file.write_text("KVFERRY_SECRET=s\nKVFERRY_API_KEYS=a,b\n")
    assert api_key({}, file) == "a"
    assert api_key({"KVFERRY_API_KEY": "c"}, file) == "c"


def test_an_option_that_is_given_comes_after_our_defaults(tmp_path: Path) -> None:
    command = locust_command("http://h", tmp_path, ["--run-time", "9s"])
    assert command[-2:] == ["--run-time", "9s"]
    assert command.index("--run-time") < len(command) - 2


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("locust"), reason="no Locust: make loadtest installs it")
def test_it_reads_fake_servers_streams_and_fails_on_one_that_is_cut(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "KVFERRY_SECRET": "s", "KVFERRY_API_KEY": "", "PYTHONPATH": str(root)}

    def results(*fake_options: str) -> tuple[int, dict[str, Any]]:
        fake = subprocess.Popen(
            [sys.executable, "-m", "loadtest.fake_vllm", "--port", "0", "--no-plugin", *fake_options],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert fake.stdout is not None
            url = fake.stdout.readline().split()[-1]
            reports = tmp_path / f"reports-{len(fake_options)}"
            options = ("--rate", "50", "--requests", "40", "--length-scale", "0.1")
            command = [sys.executable, "-m", "loadtest.load", "--url", url, "--reports", str(reports), *options]
            run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=120)
        finally:
            fake.send_signal(signal.SIGTERM)
            fake.communicate(timeout=30)
        (path,) = list(reports.glob("*/result.json")) or pytest.fail(run.stdout + run.stderr)
        return run.returncode, json.loads(path.read_text())

    status, result = results()
    assert (status, result["broken"]) == (0, 0), result
    assert result["streams"] == 40
    status, result = results("--die-at-step", "40")
    assert status == 1
    assert any(reason.startswith("cut") for reason in result["failures"]), result
