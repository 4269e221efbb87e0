"""Fake vLLM servers, with real HTTP and no model.

KVFERRY_SECRET=... python -m loadtest.fake_vllm --port 8101 --model kvferry-test
KVFERRY_SECRET=... python -m loadtest.fake_vllm --count 64 --first-port 8101 --profile llama-7b-a10

KVFERRY_INSTANCE_ID and KVFERRY_ADVERTISE_HOST mean what they mean to the plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
from collections.abc import Sequence

import uvloop

from loadtest.fake_vllm.faults import FaultError, Faults
from loadtest.fake_vllm.server import FakeServers, Options
from loadtest.sim.engine import EngineError, EngineSettings, Prefill
from loadtest.sim.profile import PRESETS, ProfileError, load_profile
from vllm_plugin.settings import SettingsError, settings_from_environment


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    secret = os.environ.get("KVFERRY_SECRET", "")
    if not secret and not given.no_plugin:
        parser.error("set KVFERRY_SECRET to the gateway's secret, or give --no-plugin for servers without a llumlet")
    try:
        options = read_options(given, secret)
    except (EngineError, FaultError, ProfileError, SettingsError) as error:
        parser.error(str(error))
    ports = [given.first_port + number for number in range(given.count)] if given.count else [given.port]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # Thousands of streams.
    try:
        uvloop.run(serve(options, ports, given.host, given.drain_timeout_s))
    except OSError as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(options: Options, ports: list[int], host: str, drain_timeout_s: float) -> None:
    """Until SIGINT or SIGTERM, and for as long as draining takes then."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with FakeServers(options, ports, host, die=kill_this_process if len(ports) == 1 else None) as fakes:
        shown = fakes.urls if len(fakes.urls) <= 2 else [fakes.urls[0], "...", fakes.urls[-1]]
        print(f"{len(fakes.urls)} fake servers of {options.models[0]}: {' '.join(shown)}", flush=True)
        ending = asyncio.create_task(ended.wait())
        failing = asyncio.create_task(fakes.wait())
        await asyncio.wait({ending, failing}, return_when=asyncio.FIRST_COMPLETED)
        await fakes.empty(drain_timeout_s if ending.done() else 0.0)
        for task in (ending, failing):
            task.cancel()
        if failing.done() and not failing.cancelled():
            failing.result()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.fake_vllm", description="Fake vLLM servers.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8101, help="of one instance")
    parser.add_argument("--count", type=int, default=0, help="so many instances in this process")
    parser.add_argument("--first-port", type=int, default=8101, help="of the first of them; the others follow")
    parser.add_argument("--model", action="append", help="a name that it serves; may be given again")
    parser.add_argument("--instance-ids", default="", help="their ids are this and a number; else address and port")
    parser.add_argument(
        "--drain-timeout-s", type=float, default=0.0, help="told to end, wait so long for requests to be moved away"
    )
    parser.add_argument("--no-plugin", action="store_true", help="plain vLLM servers, without a llumlet")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--profile", default="fast", help=f"{', '.join(PRESETS)} or a JSON file")
    speed.add_argument("--speed", type=float, default=1.0, help="so many times as fast as the profile")
    engine = parser.add_argument_group("engine (vLLM's names in brackets)")
    defaults = EngineSettings()
    engine.add_argument("--block-size", type=int, default=defaults.block_size)
    engine.add_argument("--blocks", type=int, default=defaults.blocks_total, help="[num-gpu-blocks-override]")
    engine.add_argument("--batch", type=int, default=defaults.batch_max, help="[max-num-seqs]")
    engine.add_argument("--step-tokens", type=int, default=defaults.step_tokens_max, help="[max-num-batched-tokens]")
    engine.add_argument("--sequence-tokens", type=int, default=defaults.sequence_tokens_max, help="[max-model-len]")
    engine.add_argument("--whole-prompts", action="store_true", help="no chunked prefill, as vLLM in 2024")
    engine.add_argument("--no-prefix-caching", action="store_true")
    faults = parser.add_argument_group("faults (also at run time: POST /fake/faults from this machine)")
    faults.add_argument("--latency-ms", type=float, default=0.0, help="before every answer")
    faults.add_argument("--hang-after", type=int, metavar="STEPS", help="then nothing answers any more")
    faults.add_argument("--die-at-step", type=int, metavar="STEPS")
    faults.add_argument("--busy", action="store_true", help="as one that is full: refuse every new request")
    faults.add_argument("--bad-blocks", action="store_true", help="KV blocks fetched from here are damaged")
    return parser


def read_options(given: argparse.Namespace, secret: str) -> Options:
    """Raises EngineError, FaultError, ProfileError or SettingsError."""
    named = settings_from_environment() if secret else None
    profile = load_profile(given.profile)
    if not given.speed > 0:
        raise ProfileError("--speed must be more than 0")
    faults = {
        "latency_ms": given.latency_ms,
        "hang_after": given.hang_after,
        "die_at_step": given.die_at_step,
        "busy": given.busy,
        "bad_blocks": given.bad_blocks,
    }
    Faults().set(faults)
    return Options(
        models=tuple(given.model or ["fake"]),
        secret=secret,
        engine=EngineSettings(
            block_size=given.block_size,
            blocks_total=given.blocks,
            batch_max=given.batch,
            step_tokens_max=given.step_tokens,
            sequence_tokens_max=given.sequence_tokens,
            prefill=Prefill.WHOLE_PROMPT if given.whole_prompts else Prefill.CHUNKED,
            prefix_caching=not given.no_prefix_caching,
        ),
        profile=profile.faster(given.speed),
        has_plugin=not given.no_plugin,
        faults=faults,
        instance_ids=given.instance_ids,
        instance_id=named.instance_id if named is not None else None,
        advertise_host=os.environ.get("KVFERRY_ADVERTISE_HOST"),
    )


if __name__ == "__main__":
    sys.exit(main())
