"""``kvferry profile`` finds how long the steps of an instance take, whose step times are known here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from gateway.cli.command import main
from loadtest.fake_vllm.server import FakeServers, Options
from loadtest.processes import free_port
from loadtest.profiling.fit import DecodePoint, NotEnough, PrefillPoint, fit_profile, least_squares
from loadtest.profiling.measure import Plan, measure
from loadtest.profiling.probe import About, step_ms
from loadtest.sim.engine import Engine, EngineSettings, Request
from loadtest.sim.profile import FAST, LLAMA_7B_A10, Profile, load_profile
from loadtest.sim.tokens import SyntheticPrompt

ENGINE = EngineSettings(blocks_total=851, batch_max=64, step_tokens_max=4096, sequence_tokens_max=4096)


class KnownInstance:
    """An engine in virtual time. Before its first step a request takes ``way_ms``."""

    def __init__(self, profile: Profile, way_ms: float, settings: EngineSettings = ENGINE) -> None:
        self.profile, self.way_ms, self.settings = profile, way_ms, settings
        self.prompts = 0

    async def about(self) -> About:
        return About("m", self.settings.sequence_tokens_max, self.settings.block_size, self.settings.blocks_total)

    async def round_trip_ms(self, repeats: int) -> float:
        return self.way_ms

    async def first_token_ms(self, prompt_tokens: int) -> float:
        return self.way_ms + 1000 * self.play(1, prompt_tokens, 1)[0][0][0]

    async def decode(self, requests: int, prompt_tokens: int, steps: int) -> DecodePoint | None:
        streams = self.play(requests, prompt_tokens, steps + 2 * requests)
        begin_s = max(arrivals[0][0] for arrivals in streams)
        inside = [[one for one in arrivals if one[0] >= begin_s] for arrivals in streams]
        if any(len(arrivals) < steps // 2 for arrivals in inside):
            return None
        kv_tokens = sum(prompt_tokens + (arrivals[0][1] + arrivals[-1][1]) / 2 - 1 for arrivals in inside)
        return DecodePoint(requests, kv_tokens, step_ms(inside[0]))

    def play(self, requests: int, prompt_tokens: int, output_tokens: int) -> list[list[tuple[float, int]]]:
        engine = Engine(self.settings, self.profile)
        for _ in range(requests):
            self.prompts += 1
            engine.add(Request(f"r{self.prompts:04d}", SyntheticPrompt(self.prompts, prompt_tokens), output_tokens))
        arrivals: dict[str, list[tuple[float, int]]] = {one.request_id: [] for one in engine.requests()}
        ends_at = engine.step(0.0).ends_at
        while ends_at is not None:
            outcome = engine.step(ends_at)
            for request in outcome.sampled:
                arrivals[request.request_id].append((ends_at, request.output_tokens))
            ends_at = outcome.ends_at
        return list(arrivals.values())


async def test_the_times_of_an_instance_are_found() -> None:
    known = dataclasses.replace(LLAMA_7B_A10, name="known", prefill_square_ms=5e-5)
    found = await measure(KnownInstance(known, 3.0), Plan(repeats=2))
    fitted = fit_profile("found", found.prefills, found.decodes, found.round_trip_ms)
    expected = dataclasses.asdict(known) | {"request_ms": 3.0}
    for name, value in dataclasses.asdict(fitted.profile).items():
        if name.startswith(("prefill", "decode", "request")):
            assert value == pytest.approx(expected[name], rel=0.02), name
    assert fitted.prefill_error_share < 0.01
    assert fitted.decode_error_share < 0.01
    assert max(point.requests for point in found.decodes) == 32


async def test_no_more_requests_are_asked_for_than_run_at_the_same_time() -> None:
    small = EngineSettings(blocks_total=64, batch_max=4, step_tokens_max=512, sequence_tokens_max=600)
    found = await measure(KnownInstance(LLAMA_7B_A10, 0.0, small), Plan())
    assert max(point.requests for point in found.decodes) == 4
    assert max(point.tokens for point in found.prefills) == 512
    assert all(point.kv_tokens < 64 * 16 for point in found.decodes)


def test_the_way_to_the_engine_is_no_part_of_its_steps() -> None:
    """A short prompt's first token is late by more than a decode of one: by the way, whatever a cheap answer takes."""
    decodes = [DecodePoint(count, 100.0 * count, 20.0 + count) for count in (1, 2, 4)]
    prefills = [PrefillPoint(4, 30.4), PrefillPoint(100, 40.0), PrefillPoint(1000, 130.0)]
    fitted = fit_profile("m", prefills, decodes, 1.0)
    assert fitted.profile.request_ms == pytest.approx(30.4 - 21.0, abs=0.2)
    assert fitted.profile.prefill_base_ms == pytest.approx(30.0 - 9.4, abs=0.2)
    with pytest.raises(NotEnough):
        fit_profile("m", prefills[:1], decodes, 1.0)


def test_no_coefficient_is_negative_and_the_others_are_then_the_best() -> None:
    rows = [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]
    assert least_squares(rows, [3.0, 5.0, 7.0]) == pytest.approx([1.0, 2.0])
    falling = least_squares(rows, [3.0, 2.9, 2.8])
    assert falling[1] == 0.0
    assert 2.8 < falling[0] < 3.0


def test_a_pause_of_the_machine_is_no_step() -> None:
    arrivals = [(index * 0.01 + (5.0 if index > 40 else 0.0), index + 1) for index in range(120)]
    assert step_ms(arrivals) == pytest.approx(10.0)
    assert step_ms([(0.0, 1), (0.03, 4)]) == pytest.approx(10.0)


async def test_the_command_measures_over_http_and_the_simulator_takes_what_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here time is the machine's, so what is found can only be too long."""
    known, path = FAST.faster(0.3), tmp_path / "profile.json"
    options = Options(models=("m",), engine=ENGINE, profile=known, has_plugin=False)
    flags = ["--prompt-tokens", "4,1000,3000", "--batches", "1,4", "--contexts", "16,400", "--steps", "16"]
    async with FakeServers(options, [0]) as fakes:
        command = ["profile", fakes.urls[0], "--output", str(path), "--repeats", "2", "--name", "mine", *flags]
        assert await asyncio.to_thread(main, command) == 0
    assert "--kv-blocks 851 --block-size 16 --sequence-tokens 4096" in capsys.readouterr().out
    found = load_profile(str(path))
    assert found.name == "mine"
    measured = json.loads(path.read_text())["measured"]
    assert len(measured["prefills"]) == 3
    assert len(measured["decodes"]) == 4
    for tokens, ms in measured["prefills"]:
        assert ms >= known.step_ms([(0, tokens)], 0, 0)
    for requests, kv_tokens, ms in measured["decodes"]:
        # What came at once is counted from its last token, and a fake that is late makes up for it.
        assert ms >= 0.8 * known.step_ms([], requests, kv_tokens)
    assert main(["simulate", "--trace", "S-S", "--requests", "5", "--rate", "1", "--profile", str(path)]) == 0


def test_an_instance_that_is_not_there_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"http://127.0.0.1:{free_port()}", "--output", str(tmp_path / "p.json")]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
