"""The main job, shown on real vLLM servers (`make demo`): running requests move, and their output stays the same.

Each request runs twice through the gateway, with the official `openai` client: once left alone, and once moved to the
other server in mid-stream. Both outputs are compared token by token. The exit status is 0 only if all are identical.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai

from gateway.wire import SECRET_HEADER, MigrationResult, RequestStatus, Status
from loadtest.processes import ProcessFailed, run_until_signal
from loadtest.redis_server import RedisNotFound
from loadtest.stack import Instance, Stack, StackFailed

REQUEST_TIMEOUT_S = 120.0
MIGRATE_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.02
LOGPROB_TOLERANCE = 1e-3
"""A token that is computed in a prefill and one that is computed in a decode differ in the last digits of a float."""

PROMPT = "The ferry left the harbor before morning, and the captain told a story about the river and the stone bridge. "
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT * 4}]}
COMPLETION: dict[str, Any] = {"prompt": PROMPT * 6}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    parameters: dict[str, Any]
    """As the client is called with; what is not part of OpenAI's API goes under ``extra_body``."""
    move_at_tokens: tuple[int, ...] = (80,)
    """A move is forced when the client has seen this many tokens."""
    stream: bool = True

    @property
    def is_chat(self) -> bool:
        return "messages" in self.parameters

    def twice_as_long(self) -> Case:
        return replace(self, parameters={**self.parameters, "max_tokens": 2 * self.parameters["max_tokens"]})


CASES = (
    Case("chat, greedy", {**CHAT, "temperature": 0, "max_tokens": 300}),
    Case("chat, greedy, there and back", {**CHAT, "temperature": 0, "max_tokens": 400}, move_at_tokens=(80, 220)),
    Case(
        "completion, all penalties, min_tokens",
        {
            **COMPLETION,
            "temperature": 0,
            "max_tokens": 300,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.9,
            "extra_body": {"repetition_penalty": 1.2, "min_tokens": 250},
        },
    ),
    Case("chat, sampled with a seed", {**CHAT, "temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 300}),
    Case("completion, sampled with a seed", {**COMPLETION, "temperature": 1.0, "seed": 11, "max_tokens": 300}),
    Case("chat, logprobs", {**CHAT, "temperature": 0, "max_tokens": 250, "logprobs": True, "top_logprobs": 3}),
    Case("completion, logprobs", {**COMPLETION, "temperature": 0, "max_tokens": 250, "logprobs": 2}),
    Case("chat, stop string", {**CHAT, "temperature": 0, "max_tokens": 400}),
    Case("chat, not streamed", {**CHAT, "temperature": 0, "max_tokens": 300}, stream=False),
)
STOP_CASE_NAME = "chat, stop string"
STOP_AT_TOKEN = 240


@dataclass(slots=True)
class Output:
    """What a client has received, and when."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprob_tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    usage: tuple[int, int, int] | None = None
    """Prompt, completion and total tokens."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, tokens so far) of each event that brought tokens."""

    def gap_after_ms(self, tokens: int) -> float | None:
        """The wait for the first event that went past ``tokens``, as the client saw it."""
        for (before, _), (after, total) in itertools.pairwise(self.arrivals):
            if total > tokens:
                return 1000 * (after - before)
        return None


@dataclass(frozen=True, slots=True)
class Move:
    """``pause_ms``: the gap at the move, as the client saw it. The other gaps are those of the same stream."""

    result: MigrationResult
    pause_ms: float | None
    usual_gap_ms: float
    largest_other_gap_ms: float


def measure_moves(output: Output, results: Sequence[MigrationResult]) -> list[Move]:
    pauses_ms = [output.gap_after_ms(result.output_tokens) for result in results]
    gaps_ms = [1000 * (after - before) for (before, _), (after, _) in itertools.pairwise(output.arrivals)]
    other_gaps_ms = [gap_ms for gap_ms in gaps_ms if gap_ms not in pauses_ms]
    # A mean over tokens: on a busy machine several events arrive at once, and a median would say that gaps are nil.
    usual_ms = sum(other_gaps_ms) / max(len(output.token_ids) - 1, 1)
    return [
        Move(result, pause_ms, usual_ms, max(other_gaps_ms, default=0.0))
        for result, pause_ms in zip(results, pauses_ms, strict=True)
    ]


ATTEMPTS_MAX = 4


class MoveFailed(RuntimeError):
    """A forced migration did not come about."""


@dataclass(slots=True)
class Ferry:
    """Runs cases against a stack."""

    stack: Stack
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def run_unmoved(self, case: Case) -> Output:
        return await self._request(case, Output())

    async def run_moved(self, case: Case) -> tuple[Output, list[Move]]:
        """Run the case, and force its moves on the way."""
        output = Output()
        request = asyncio.create_task(self._request(case, output))
        moves = asyncio.create_task(self._force_moves(case, output, request))
        try:
            await request
            results = await moves
        finally:
            for task in (request, moves):
                task.cancel()
            await asyncio.gather(request, moves, return_exceptions=True)
        return output, measure_moves(output, results)

    async def _request(self, case: Case, output: Output) -> Output:
        parameters = {**case.parameters, "model": self.stack.model, "stream": case.stream}
        # The salt keeps the runs out of each other's prefix cache: what the destination knows must have come in a move.
        parameters["extra_body"] = {
            **parameters.get("extra_body", {}),
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": secrets.token_hex(8),
        }
        if case.stream:
            parameters["stream_options"] = {"include_usage": True}
        api: Any = self.client.chat.completions if case.is_chat else self.client.completions
        reply = await api.create(**parameters)
        if case.stream:
            async for event in reply:
                _record(output, event, case.is_chat)
        else:
            _record(output, reply, case.is_chat)
        return output

    async def _force_moves(self, case: Case, output: Output, request: asyncio.Task[Output]) -> list[MigrationResult]:
        results = []
        for tokens in case.move_at_tokens:
            request_id, source = await self._wait_for_tokens(case, tokens, output, request)
            destination = next(instance for instance in self.stack.instances if instance.id != source.id)
            reply = await self.http.post(
                f"{self.stack.gateway_url}/admin/migrate",
                json={"request": request_id, "destination": destination.id},
                headers={"authorization": f"Bearer {self.stack.admin_key}"},
                timeout=MIGRATE_TIMEOUT_S,
            )
            if reply.status_code != 200:
                raise MoveFailed(f"POST /admin/migrate answered {reply.status_code}: {reply.text}")
            result = MigrationResult.from_json(reply.json())
            if result.outcome != "committed":
                raise MoveFailed(f"the migration was {result.outcome}: {result.reason}")
            results.append(result)
            # The next move begins when this client has seen the end of this one.
            while case.stream and len(output.token_ids) <= result.output_tokens and not request.done():
                await asyncio.sleep(POLL_INTERVAL_S)
        return results

    async def _wait_for_tokens(
        self, case: Case, tokens: int, output: Output, request: asyncio.Task[Output]
    ) -> tuple[str, Instance]:
        """The one running request's id and where it is, once it has that many output tokens.

        A stream's tokens are counted here; of a reply in one piece only the instances know how far it is.
        """
        while not request.done():
            if not case.stream or len(output.token_ids) >= tokens:
                for instance in self.stack.instances:
                    for status in await self._running(instance):
                        if status.output_tokens >= tokens:
                            return status.request_id, instance
            await asyncio.sleep(POLL_INTERVAL_S)
        raise MoveFailed(f"the request ended before it had {tokens} tokens, so it could not be moved there")

    async def _running(self, instance: Instance) -> list[RequestStatus]:
        reply = await self.http.get(f"{instance.url}/llumlet/status", headers={SECRET_HEADER: self.stack.secret})
        requests = Status.from_json(reply.raise_for_status().json()).requests
        return [status for status in requests if status.state == "running"]


def _record(output: Output, event: Any, is_chat: bool) -> None:
    """Add one event of a stream, or a whole reply."""
    output.ids.add(event.id)
    output.created.add(event.created)
    if event.usage is not None:
        output.usage = (event.usage.prompt_tokens, event.usage.completion_tokens, event.usage.total_tokens)
    for choice in event.choices:
        token_ids = getattr(choice, "token_ids", None) or []
        if token_ids:
            output.token_ids += token_ids
            output.arrivals.append((time.perf_counter(), len(output.token_ids)))
        if is_chat:
            message = getattr(choice, "delta", None) or choice.message
            output.text += message.content or ""
            if message.role:
                output.roles.append(message.role)
        else:
            output.text += choice.text or ""
        if choice.finish_reason:
            output.finish_reasons.append(choice.finish_reason)
        if choice.logprobs is not None:
            if is_chat:
                entries = choice.logprobs.content or []
                output.logprob_tokens += [entry.token for entry in entries]
                output.logprobs += [entry.logprob for entry in entries]
            else:
                output.logprob_tokens += choice.logprobs.tokens or []
                output.logprobs += choice.logprobs.token_logprobs or []


def differences(expected: Output, moved: Output, is_chat: bool) -> list[str]:
    """How a moved run differs from the one left alone; empty: not at all."""
    found = []
    if expected.token_ids != moved.token_ids:
        pairs = zip(expected.token_ids, moved.token_ids, strict=False)
        index = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        where = "in number" if index is None else f"from token {index + 1} on"
        found.append(f"tokens differ {where} ({len(expected.token_ids)} and {len(moved.token_ids)})")
    for name in ("text", "finish_reasons", "usage", "logprob_tokens"):
        left, right = getattr(expected, name), getattr(moved, name)
        if left != right:
            found.append(f"{name} differ: {_short(left)} and {_short(right)}")
    if len(expected.logprobs) == len(moved.logprobs):
        pairs_of_logprobs = zip(expected.logprobs, moved.logprobs, strict=True)
        largest = max((abs(left - right) for left, right in pairs_of_logprobs), default=0.0)
        if largest > LOGPROB_TOLERANCE:
            found.append(f"logprobs differ by up to {largest:.2g}")
    else:
        found.append(f"{len(expected.logprobs)} and {len(moved.logprobs)} logprobs")
    if not moved.token_ids:
        found.append("no tokens")
    if len(moved.ids) != 1 or len(moved.created) != 1:
        found.append(f"the stream has {len(moved.ids)} ids and {len(moved.created)} creation times")
    if is_chat and moved.roles != ["assistant"]:
        found.append(f"roles {moved.roles}")
    if len(moved.finish_reasons) != 1:
        found.append(f"finish reasons {moved.finish_reasons}")
    if moved.usage is None or moved.usage[1] != len(moved.token_ids):
        found.append(f"usage {moved.usage} for {len(moved.token_ids)} tokens")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:30]} ... {text[-26:]}"


def choose_stop_string(pieces: Sequence[str], at_token: int) -> str:
    """A string that begins in one token and ends in the next, and occurs first at about ``at_token``."""
    for index in range(at_token, len(pieces) - 1):
        left, right = pieces[index], pieces[index + 1]
        stop = left[-3:] + right[:3]
        before = "".join(pieces[: index + 1]) + right[:2]
        if len(stop) == 6 and stop.isprintable() and "\ufffd" not in stop and stop not in before:
            return stop
    raise AssertionError("no stop string in the output")


async def prepare_stop_case(case: Case, ferry: Ferry) -> Case:
    """The case with a stop string out of its own output, which logprobs tell token by token."""
    plain = replace(case, parameters={**case.parameters, "logprobs": True})
    output = await ferry.run_unmoved(plain)
    return replace(
        case, parameters={**case.parameters, "stop": choose_stop_string(output.logprob_tokens, STOP_AT_TOKEN)}
    )


def describe_move(move: Move) -> str:
    result = move.result
    where = f"{result.source_id} -> {result.destination_id} at token {result.output_tokens}"
    how = f"{result.blocks_sent} KV blocks in {result.stages} stages, {result.duration_ms:.0f} ms in all"
    if move.pause_ms is None:
        return f"{where}: {how}"
    usual = f"usual gap {move.usual_gap_ms:.0f} ms, largest other gap {move.largest_other_gap_ms:.0f} ms"
    return f"{where}: pause {move.pause_ms:.0f} ms ({usual}); {how}"


async def run_both(ferry: Ferry, case: Case) -> tuple[Output, Output, list[Move]]:
    """Left alone, and moved. On a busy machine a stream can end before the order to move it gets through: then both are
    run again, twice as long."""
    for attempt in itertools.count(1):
        expected = await ferry.run_unmoved(case)
        print(f"      left alone: {len(expected.token_ids)} tokens: {_short(expected.text)}", flush=True)
        try:
            return expected, *await ferry.run_moved(case)
        except MoveFailed as error:
            if attempt == ATTEMPTS_MAX:
                raise
            print(f"      not moved, so once more: {error}", flush=True)
            case = case.twice_as_long()
    raise AssertionError


async def show(stack: Stack, cases: Sequence[Case]) -> int:
    identical = 0
    client = openai.AsyncOpenAI(
        base_url=f"{stack.gateway_url}/v1", api_key=stack.api_key, max_retries=0, timeout=REQUEST_TIMEOUT_S
    )
    async with client, httpx.AsyncClient(timeout=10, trust_env=False) as http:
        ferry = Ferry(stack, client, http)
        for index, case in enumerate(cases, 1):
            stack.require_running()
            print(f"\n[{index}/{len(cases)}] {case.name}", flush=True)
            try:
                if case.name == STOP_CASE_NAME:
                    case = await prepare_stop_case(case, ferry)
                    print(f"      stops at {case.parameters['stop']!r}", flush=True)
                expected, moved, moves = await run_both(ferry, case)
            except (MoveFailed, openai.APIError, httpx.HTTPError) as error:
                print(f"      FAILED: {error}", flush=True)
                continue
            for move in moves:
                print(f"      moved: {describe_move(move)}", flush=True)
            found = differences(expected, moved, case.is_chat)
            identical += not found
            print("      identical" if not found else "      DIFFERENT: " + "; ".join(found), flush=True)
    print(f"\nidentical: {identical}/{len(cases)}", flush=True)
    return 0 if identical == len(cases) else 1


async def run(arguments: argparse.Namespace) -> int:
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        print(f"error: no request's name contains {arguments.only!r}", file=sys.stderr)
        return 2
    try:
        async with Stack(instances=2) as stack:
            return await show(stack, cases)
    except (StackFailed, ProcessFailed, RedisNotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        print("everything is stopped", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the requests whose name contains TEXT")
    return run_until_signal(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
