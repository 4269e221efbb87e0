"""Users of an OpenAI-compatible server who read every stream to its end, for Locust. How to run it: docs/loadtest.md

With ``--rate`` requests come at the workload's own times, however long the others take: what a server must bear.
Without, each of Locust's users sends the next one when it has read the last.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import gevent.pool
from geventhttpclient.client import HTTPClient
from geventhttpclient.url import URL
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import LocalRunner

from loadtest.load import report
from loadtest.load.journal import Journal, Stream
from loadtest.load.request import Endpoint, body, headers
from loadtest.load.stream import Reading, refusal
from loadtest.workloads.supply import NAMES, Fit, supply
from loadtest.workloads.workload import Arrival, WorkloadError

TIMEOUT_S = 600.0
"""Between two reads, as long as a gateway waits for a first token."""
BLOCK_BYTES = 16_384
BODY_BYTES_MAX = 65_536
"""Of a reply that is no stream."""


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    ours = parser.add_argument_group("kvferry")
    ours.add_argument("--workload", default="S-S", help=f"{', '.join(NAMES)}, or a CSV file (default S-S)")
    ours.add_argument("--rate", type=float, default=0.0, help="requests a second, at the workload's own times; 0: none")
    ours.add_argument("--requests", type=int, default=0, help="end after so many; 0: when --run-time is over")
    ours.add_argument("--cv", type=float, default=1.0, help="of the gaps between generated arrivals (1: Poisson)")
    ours.add_argument("--length-scale", type=float, default=1.0, help="lengths are multiplied by it (default 1)")
    ours.add_argument("--tokens-max", type=int, default=0, help="of prompt and output (default: what the model takes)")
    ours.add_argument("--high-share", type=float, default=0.0, help="share of requests of high priority (default 0)")
    ours.add_argument("--seed", type=int, default=1)
    ours.add_argument("--endpoint", choices=[str(one) for one in Endpoint], default=str(Endpoint.COMPLETIONS))
    ours.add_argument("--model", default="", help="default: the first that the server names")
    ours.add_argument("--in-flight-max", type=int, default=5_000, help="with --rate: streams at a time (default 5000)")
    parser.add_argument("--api-key", env_var="KVFERRY_API_KEY", default="", is_secret=True, include_in_web_ui=False)
    parser.add_argument("--report", default="", help="directory for the report", include_in_web_ui=False)


class LoadTest:
    """One run: what its users share."""

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        assert options is not None
        self.environment = environment
        self.options = options
        self.host = str(environment.host or "").rstrip("/")
        self.endpoint = Endpoint(options.endpoint)
        self.is_open = options.rate > 0
        self.http = HTTPClient.from_url(
            URL(self.host),
            concurrency=options.in_flight_max,
            block_size=BLOCK_BYTES,
            connection_timeout=30.0,
            network_timeout=TIMEOUT_S,
        )
        self.model, length_max = self._model()
        fit = Fit(options.length_scale, options.tokens_max or length_max)
        source = supply(
            options.workload,
            rate_rps=options.rate or 1.0,
            seed=options.seed,
            cv=options.cv,
            high_priority_share=options.high_share,
        )
        self.arrivals: Iterator[Arrival] = map(fit.apply, itertools.islice(source, options.requests or None))
        self.is_over = False
        self.chance = random.Random(f"{options.seed} prompts")
        self.pool = gevent.pool.Pool(options.in_flight_max)
        self.journal = Journal()
        self.began = time.monotonic()

    def _model(self) -> tuple[str, int | None]:
        """Its name, and how many tokens it takes. Raises WorkloadError."""
        key = {"authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        try:
            response = self.http.get("/v1/models", headers=key)
            text = response.read()
        except OSError as error:
            raise WorkloadError(f"Nobody answers at {self.host}: {error}") from error
        if response.status_code != 200:
            raise WorkloadError(f"{self.host}/v1/models: {refusal(response.status_code, text)}")
        cards = {str(card["id"]): card.get("max_model_len") for card in json.loads(text)["data"]}
        name = self.options.model or next(iter(cards), "")
        if name not in cards:
            raise WorkloadError(f"{self.host} has no model {name!r}; it has {', '.join(cards) or 'none'}.")
        return name, cards[name]

    def send(self, arrival: Arrival) -> None:
        """With --rate: waits until the request's time has come, and does not wait for its end."""
        planned_at = self.began + arrival.at_s
        gevent.sleep(max(0.0, planned_at - time.monotonic()))
        if self.pool.full():
            self._ended(Reading(time.monotonic(), arrival.output_tokens, wrong="not sent"), arrival, 0.0)
            return
        self.pool.spawn(self.stream, arrival, planned_at)

    def end_test(self) -> None:
        """No request is left to be sent; those that are under way are read to their end."""
        if not self.is_over:
            self.is_over = True
            gevent.spawn(self.environment.runner.quit)  # It waits for the users, of whom one is here.
        gevent.sleep(0.1)

    def stream(self, arrival: Arrival, planned_at: float | None = None) -> None:
        sent = body(arrival, self.endpoint, self.model, self.chance)
        asked_at = time.monotonic()
        reading = Reading(asked_at, arrival.output_tokens)
        try:
            self._read(sent, arrival, reading)
        except gevent.GreenletExit:
            self.journal.unfinished += 1
            raise
        # geventhttpclient's own errors are of several kinds; a timeout and a reset are OSErrors.
        except (OSError, ValueError, RuntimeError) as error:
            reading.cut(type(error).__name__)
        self._ended(reading, arrival, max(0.0, asked_at - planned_at) if planned_at is not None else 0.0)

    def _read(self, sent: dict[str, Any], arrival: Arrival, reading: Reading) -> None:
        key = self.options.api_key
        response = self.http.post(self.endpoint.path, body=json.dumps(sent), headers=headers(arrival, key))
        try:
            if response.status_code != 200:
                reading.wrong = refusal(response.status_code, response.read(BODY_BYTES_MAX))
                return
            while block := response.readline(b"\n\n"):
                reading.take(block, time.monotonic())
            if rest := response.read():
                reading.take(rest, time.monotonic())
        finally:
            response.release()

    def _ended(self, reading: Reading, arrival: Arrival, late_s: float) -> None:
        now, wrong = time.monotonic(), reading.verdict()
        first_at, gaps_s = reading.first_at, reading.gaps_s
        stream = Stream(
            asked_at=reading.asked_at - self.began,
            priority=arrival.priority,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            late_s=late_s,
            ended_at=now - self.began,
            ttft_s=first_at - reading.asked_at if first_at is not None else None,
            gap_max_s=max(gaps_s, default=None),
            wrong=wrong,
        )
        self.journal.add(stream, gaps_s, reading.tokens or 0)
        self._tell_locust(stream, reading)

    def _tell_locust(self, stream: Stream, reading: Reading) -> None:
        """The stream as a request, and what was within it as requests of other kinds."""
        rows = [("POST", stream.seconds, reading.bytes_read, stream.wrong)]
        if stream.ttft_s is not None:
            rows.append(("TTFT", stream.ttft_s, 0, None))
        if stream.gap_max_s is not None:
            mean_s = sum(reading.gaps_s) / len(reading.gaps_s)
            rows += [("GAP", mean_s, 0, None), ("LONGEST GAP", stream.gap_max_s, 0, None)]
        for kind, seconds, length, wrong in rows:
            self.environment.events.request.fire(
                request_type=kind,
                name=self.endpoint.path,
                response_time=seconds * 1000,
                response_length=length,
                exception=BrokenStream(wrong) if wrong is not None else None,
                context={},
            )

    def finish(self) -> None:
        """All that was sent has ended, or been given up."""
        self.journal.unfinished += len(self.pool)
        self.pool.kill(block=True, timeout=5.0)
        self.http.close()
        if self.options.report:
            about = {name: value for name, value in sorted(vars(self.options).items()) if name in ABOUT}
            page = report.write(self.journal, {"host": self.host, **about}, Path(self.options.report))
            print(report.table(self.journal.figures()), flush=True)
            print(f"report: {page}", flush=True)


ABOUT = {
    *("workload", "rate", "cv", "length_scale", "tokens_max", "high_share", "seed", "endpoint", "model"),
    *("num_users", "run_time", "requests", "in_flight_max"),
}


class BrokenStream(Exception):
    """What was wrong with a stream; one row of Locust's a kind."""


class Reader(User):
    """One of Locust's users: reads streams one after the other, or sends them when their time has come."""

    @task
    def next_stream(self) -> None:
        run = current.run
        assert run is not None
        arrival = next(run.arrivals, None)
        if arrival is None:
            run.end_test()
        elif run.is_open:
            run.send(arrival)
        else:
            run.stream(arrival)

    def on_stop(self) -> None:
        """With --rate: the last user to stop waits for the streams; --stop-timeout bounds it."""
        if current.run is not None:
            current.run.pool.join()


class Current:
    """Locust makes users and calls listeners by itself: this is what they find the run by."""

    def __init__(self) -> None:
        self.run: LoadTest | None = None
        self.streams = 0


current = Current()


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    runner = environment.runner
    if not isinstance(runner, LocalRunner):
        raise SystemExit("kvferry's load test runs in one process: without --master, --worker and --processes.")
    try:
        current.run = LoadTest(environment)
    except WorkloadError as error:
        raise SystemExit(f"error: {error}") from None


@events.test_stop.add_listener
def end(**_: Any) -> None:
    if current.run is not None:
        current.run.finish()
        current.streams += current.run.journal.ended
        current.run = None


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """A test that has read nothing has shown nothing."""
    if not current.streams:
        environment.process_exit_code = 1
