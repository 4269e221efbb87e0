"""``kvferry profile``: how long the steps of a running vLLM instance take, as a file for ``kvferry simulate``.

kvferry profile http://127.0.0.1:8101 --output profile.json
kvferry simulate --trace M-M --rate 2 --profile profile.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.profiling.fit import Fit, NotEnough, fit_profile
from loadtest.profiling.measure import Measured, Plan, measure
from loadtest.profiling.probe import TIMEOUT_S, Probe, ProbeFailed
from loadtest.progress import Progress, Step

KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("url", help="of the instance itself, which must have nothing else to do meanwhile")
    parser.add_argument("--output", default="profile.json", help="where the profile goes (default profile.json)")
    parser.add_argument("--model", help="default: the first that it serves")
    parser.add_argument("--name", help="of the profile (default: the model's)")
    parser.add_argument("--repeats", type=int, default=plan.repeats, help=f"of each prompt (default {plan.repeats})")
    parser.add_argument("--prompt-tokens", type=_lengths, default=plan.prompt_tokens, help=_said(plan.prompt_tokens))
    parser.add_argument("--contexts", type=_lengths, default=plan.contexts, help=_said(plan.contexts))
    parser.add_argument("--batches", type=_lengths, default=plan.batches, help=_said(plan.batches))
    parser.add_argument("--steps", type=int, default=plan.steps, help=f"of each decode (default {plan.steps})")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    migration = parser.add_argument_group("what a move costs, which is not measured")
    migration.add_argument("--kv-bytes-per-token", type=int, default=524_288, help="default 524288")
    migration.add_argument("--copy-bytes-per-s", type=float, default=2.56e9, help="default 2.56e9")
    migration.add_argument("--downtime-ms", type=float, default=0.0, help="beside the destination's step (default 0)")
    parser.set_defaults(run=run)
    parser.epilog = (
        f"An API key is read from {KEY_VARIABLE}.\n"
        "example:\n  kvferry profile http://127.0.0.1:8101 --output profile.json"
    )


def run(flags: argparse.Namespace) -> int:
    plan = Plan(flags.prompt_tokens, flags.contexts, flags.batches, flags.repeats, flags.steps)
    try:
        with Progress().step(f"measuring {flags.url}") as step:
            found = asyncio.run(_measure(flags, plan, step))
        fitted = fit_profile(flags.name or found.about.model, found.prefills, found.decodes, found.round_trip_ms)
    except (ProbeFailed, NotEnough) as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 1
    profile = dataclasses.replace(
        fitted.profile,
        kv_bytes_per_token=flags.kv_bytes_per_token,
        copy_bytes_per_s=flags.copy_bytes_per_s,
        downtime_base_ms=flags.downtime_ms,
    )
    fitted = dataclasses.replace(fitted, profile=profile)
    Path(flags.output).write_text(json.dumps(document(found, fitted), indent=1) + "\n")
    print(describe(found, fitted, flags.output))
    return 0


async def _measure(flags: argparse.Namespace, plan: Plan, step: Step) -> Measured:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(trust_env=False, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        probe = Probe(http, flags.url, flags.seed, os.environ.get(KEY_VARIABLE), flags.model)
        return await measure(probe, plan, step.update)


def document(found: Measured, fitted: Fit) -> dict[str, Any]:
    """The profile, and what it was made from."""
    return fitted.profile.to_json() | {
        "measured": {
            "about": dataclasses.asdict(found.about),
            "round_trip_ms": round(found.round_trip_ms, 3),
            "prefills": [[one.tokens, round(one.ms, 3)] for one in found.prefills],
            "decodes": [[one.requests, round(one.kv_tokens), round(one.ms, 3)] for one in found.decodes],
            "prefill_error_share": round(fitted.prefill_error_share, 4),
            "decode_error_share": round(fitted.decode_error_share, 4),
        }
    }


def describe(found: Measured, fitted: Fit, path: str) -> str:
    one, about = fitted.profile, found.about
    prefill = (
        f"{one.prefill_base_ms:g} ms + {one.prefill_token_ms:g} a token + {one.prefill_square_ms:g} a token squared"
    )
    decode = f"{one.decode_base_ms:g} ms + {one.decode_request_ms:g} a request + {one.decode_kv_token_ms:g} a KV token"
    lines = [
        f"request  {one.request_ms:g} ms to the engine and back",
        f"prefill  {prefill} (mean error {fitted.prefill_error_share:.1%})",
        f"decode   {decode} (mean error {fitted.decode_error_share:.1%})",
        "",
        f"kvferry simulate --profile {path} --prefill chunked --step-tokens 2048",
    ]
    if about.blocks_total is not None and about.block_size is not None:
        longest = f" --sequence-tokens {about.sequence_tokens_max}" if about.sequence_tokens_max else ""
        lines[-1] += f" --kv-blocks {about.blocks_total} --block-size {about.block_size}{longest}"
    return "\n".join(lines)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        values = ()
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError(f"must be numbers from 1 on with commas between, not {text!r}")
    return values


def _said(values: tuple[int, ...]) -> str:
    return f"default {','.join(map(str, values))}"
