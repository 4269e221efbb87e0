"""Both sides of a migration in the API server, with an engine and a peer that a test scripts."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gateway import wire
from gateway.policy.picking import Movable
from vllm_plugin.settings import MIGRATIONS_IN_MAX, MOVES_COUNTED_MAX, Settings

pytestmark = [pytest.mark.slow]

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def plugin() -> SimpleNamespace:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_plugin import compat, incoming, llumlet, outgoing, session
    return SimpleNamespace(compat=compat, incoming=incoming, llumlet=llumlet, outgoing=outgoing, session=session)


class Engine:
    """Answers every operation, and remembers it."""

    def __init__(self, **answers: dict[str, Any]) -> None:
        self.operations: list[str] = []
        self._answers = answers

    async def __call__(self, operation: str, **payload: Any) -> Any:
        self.operations.append(operation)
        default = {"accepted": True, "reused": 0, "block_ids": [], "finish": None}
        return self._answers.get(operation, default)


def build_llumlet(plugin: SimpleNamespace, engine: Engine) -> Any:
    module: ModuleType = plugin.llumlet
    data = module.Data([], None, None)
    llumlet = module.Llumlet(Settings("s", None, HOST), "b", [], None, {"block_size": 4}, data, None)
    llumlet.engine = engine
    return llumlet


def reserve(plugin: SimpleNamespace, request_id: str, **changes: Any) -> Any:
    body = {
        "request_id": request_id,
        "source_id": "a",
        "kv_format": None,
        "agents": [],
        "read_token": "t",
        "prompt_token_ids": [1, 2],
        "output_token_ids": [3],
        "cache_salt": None,
        "blocks": 0,
    }
    return plugin.llumlet.Reserve.from_json(body | changes)


async def test_only_migrations_under_way_count_against_the_limit(plugin: SimpleNamespace) -> None:
    """Requests that have arrived stay for minutes: they must not keep the next ones out."""
    llumlet = build_llumlet(plugin, Engine())
    for index in range(MIGRATIONS_IN_MAX + 1):
        await llumlet.reserve(f"m{index}", reserve(plugin, f"r{index}"))
        await llumlet.commit(f"m{index}", plugin.llumlet.Commit(0, [], 1, [4], 0.0, 2, None, 0))
    for index in range(MIGRATIONS_IN_MAX):
        await llumlet.reserve(f"n{index}", reserve(plugin, f"s{index}"))
    with pytest.raises(plugin.incoming.Refused, match="no more migrations"):
        await llumlet.reserve("one too many", reserve(plugin, "t"))


async def test_a_committed_request_that_nobody_opens_is_given_up_within_two_seconds(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has left just when it moved: the gateway will never come, and the source has let go."""
    engine = Engine()
    llumlet = build_llumlet(plugin, engine)
    await llumlet.reserve("m", reserve(plugin, "r"))
    await llumlet.commit("m", plugin.llumlet.Commit(0, [], 1, [4], 0.0, 2, None, 0))
    now = plugin.incoming.time.monotonic()
    monkeypatch.setattr(plugin.llumlet.time, "monotonic", lambda: now + 1.8)
    llumlet._expire()
    await asyncio.gather(*llumlet._tasks)
    assert engine.operations[-1] == "cancel"
    with pytest.raises(plugin.incoming.Refused):
        llumlet.open_session("r", "m", is_chat=False)


async def test_a_committed_request_whose_client_leaves_before_the_engine_has_it_is_given_up(
    plugin: SimpleNamespace,
) -> None:
    """vLLM then has nothing to abort, so nobody else would free what was set aside."""
    engine = Engine()
    llumlet = build_llumlet(plugin, engine)
    await llumlet.reserve("m", reserve(plugin, "r"))
    await llumlet.commit("m", plugin.llumlet.Commit(0, [], 1, [4], 0.0, 2, None, 0))
    session = llumlet.open_session("r", "m", is_chat=False)
    assert "cancel" not in engine.operations
    llumlet.close_session(session)
    await asyncio.gather(*llumlet._tasks)
    assert engine.operations[-1] == "cancel"
    assert llumlet._incoming == {}


async def test_a_reserve_that_comes_after_its_abort_is_refused(plugin: SimpleNamespace) -> None:
    llumlet = build_llumlet(plugin, Engine())
    await llumlet.abort("m", "the client left")
    with pytest.raises(plugin.incoming.Refused, match="given up"):
        await llumlet.reserve("m", reserve(plugin, "r"))


@pytest.mark.parametrize("agents", [[["host"]], [["host", "port"]], [[1, 2]], [["host", 0]], [["host", 70000]]])
async def test_malformed_agents_are_a_bad_message(plugin: SimpleNamespace, agents: Any) -> None:
    from gateway.wire import WireError

    llumlet = build_llumlet(plugin, Engine())
    with pytest.raises(WireError, match="agents"):
        await llumlet.reserve("m", reserve(plugin, "r", agents=agents))


async def test_one_bad_round_does_not_end_the_reports(plugin: SimpleNamespace) -> None:
    class Failing(Engine):
        async def __call__(self, operation: str, **payload: Any) -> Any:
            self.operations.append(operation)
            if len(self.operations) == 1:
                raise RuntimeError("a utility call failed")
            return {
                "running": [],
                "waiting": [],
                "running_by_class": {},
                "waiting_by_class": {},
                "blocks_total": 8,
                "blocks_free": 8,
                "blocks_reserved": 0,
                "step_ms": 0.0,
                "staying": {},
                "room_blocks": 8,
                "room_places": 2,
            }

    llumlet = build_llumlet(plugin, Failing())
    llumlet._description = {"block_size": 4, "requests_running_max": 2}
    llumlet.start()
    try:
        async with asyncio.timeout(5):
            report = await anext(llumlet.reports())
        assert (report.blocks_total, report.room_blocks, report.room_places) == (8, 8, 2)
    finally:
        await llumlet.close()


async def test_reports_end_with_the_engine(plugin: SimpleNamespace) -> None:
    class Dead(Engine):
        async def __call__(self, operation: str, **payload: Any) -> Any:
            raise plugin.compat.EngineDeadError

    llumlet = build_llumlet(plugin, Dead())
    llumlet.start()
    try:
        async with asyncio.timeout(5):
            assert [report async for report in llumlet.reports()] == []
    finally:
        await llumlet.close()


EXPORT = {
    "state": "running",
    "reason": None,
    "block_ids": [],
    "output_token_ids": [5],
    "preemptions": 0,
    "prompt_tokens": 1,
    "prompt_token_ids": [1],
    "cache_salt": None,
}


@pytest.mark.parametrize("answer", [{}, {"bytes": "many", "bound": True}, {"bytes": 1}])
async def test_an_unexpected_answer_of_a_peer_ends_the_migration_in_order(
    plugin: SimpleNamespace, answer: dict[str, Any]
) -> None:
    """The request goes on here, and neither the peer nor the gateway is left waiting."""
    engine = Engine(export=EXPORT)
    steps: list[str] = []
    comments: list[Any] = []

    class Peer:
        async def post(self, step: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            steps.append(step)
            return {"copy": False, "reused": 0} if step == "reserve" else answer

    session = SimpleNamespace(request_id="r", send_comment=comments.append, moves=0)
    destination = plugin.outgoing.Destination("b", "http://b")
    migration = plugin.outgoing.Migration(session, "a", destination, lambda *_: Peer(), engine, [], None, HOST)
    result = await migration.run()
    assert result.outcome == "aborted"
    assert steps == ["reserve", "stage", "abort"]
    assert [type(comment).__name__ for comment in comments] == ["Prebind", "Unbind"]
    assert engine.operations[-2:] == ["unfreeze", "unpin"]


async def test_a_request_that_moves_on_takes_the_number_of_its_moves_along(plugin: SimpleNamespace) -> None:
    """As many as its first source said, and one: so no instance moves it once too often."""
    llumlet = build_llumlet(plugin, Engine(export=EXPORT))
    await llumlet.reserve("m", reserve(plugin, "r", moves=2))
    session = llumlet.open_session("r", "m", is_chat=False)
    session.reason = None
    llumlet.pair(dataclasses.replace(pairing(1), moves_max=3, cool_down_s=5.0, protected=[-100]))
    entry = {"request_id": "r", "state": "running", "prompt_tokens": 2, "output_tokens": 3, "priority": -100}
    (candidate,) = llumlet._movable([entry | {"reason": None, "settled_s": 6.0}])
    assert candidate == Movable("r", 100, 5, True, moves=3, settled_s=6.0, is_protected=True)
    posted: list[dict[str, Any]] = []

    class Peer:
        async def post(self, step: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            posted.append(body)
            raise plugin.incoming.Refused("full")

    destination = plugin.outgoing.Destination("c", "http://c")
    await plugin.outgoing.Migration(session, "b", destination, lambda *_: Peer(), llumlet.engine, [], None, HOST).run()
    assert plugin.llumlet.Reserve.from_json(posted[0]).moves == 3


async def test_what_a_peer_or_a_gateway_says_of_moves_is_bounded(plugin: SimpleNamespace) -> None:
    llumlet = build_llumlet(plugin, Engine())
    await llumlet.reserve("m", reserve(plugin, "r", moves=wire.NUMBER_MAX))
    llumlet.put_resume("n", wire.Resume("s", [1], moves=-5))
    opened = [llumlet.open_session(*ids, is_chat=False).moves for ids in (("r", "m"), ("s", "n"), ("t", None))]
    assert opened == [MOVES_COUNTED_MAX, 0, 0]


class FrontEnd:
    """As much of AsyncLLM's output processor as a session looks at."""

    def __init__(self) -> None:
        self.external_req_ids: dict[str, list[str]] = {"chatcmpl-r": ["old"]}
        self.request_states: dict[str, Any] = {"old": SimpleNamespace(name="old")}
        self.stream_interval = 1


def sampling_params() -> Any:
    return SimpleNamespace(
        extra_args=None,
        output_kind=None,
        n=1,
        prompt_logprobs=None,
        structured_outputs=None,
        flat_logprobs=False,
        logprob_token_ids=None,
        watermarking=None,
        stream_interval=1,
    )


async def test_a_session_finds_its_own_state_beside_an_old_one_of_the_same_id(plugin: SimpleNamespace) -> None:
    """The same request comes again before vLLM has let go of the last one: a leg that was closed and opened anew."""
    front_end = FrontEnd()
    new = SimpleNamespace(name="new")

    async def stock(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        front_end.external_req_ids["chatcmpl-r"].append("new")
        front_end.request_states["new"] = new
        await asyncio.sleep(0.01)  # The engine's first step.
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])], finished=True)

    session = plugin.session.Session("r", None, SimpleNamespace(output_processor=front_end))
    async for _ in session.generate(stock, "p", sampling_params(), "chatcmpl-r", {}):
        pass
    assert session.state is new


@pytest.mark.parametrize("stop_string", [None, "END"])
async def test_a_request_whose_tokens_end_in_a_stop_string_is_not_run(
    plugin: SimpleNamespace, stop_string: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.compat, "replay", lambda *_: stop_string)
    finished: list[tuple[str, Any]] = []
    engine = Engine()
    incoming = plugin.incoming.Incoming("m", "r", engine)
    incoming.tokens = [1, 2]
    session = plugin.session.Session("r", incoming, None)
    session.state, session.final_only = object(), True
    session.finish_reply = lambda *ending: finished.append(ending)
    incoming.attach(session)
    assert await incoming.commit()
    assert engine.operations == (["cancel"] if stop_string else ["commit"])
    assert finished == ([("stop", "END")] if stop_string else [])


async def test_a_bug_while_a_late_resume_is_finished_fails_that_resume_alone(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway has opened the request after the commit: nobody awaits what comes of it."""

    class Broken(Engine):
        async def __call__(self, operation: str, **payload: Any) -> Any:
            raise RuntimeError("a utility call failed")

    monkeypatch.setattr(plugin.compat, "replay", lambda *_: None)
    incoming = plugin.incoming.Incoming("m", "r", Broken())
    incoming.tokens, incoming.committed = [1, 2], True
    session = plugin.session.Session("r", incoming, None)
    session.state, session.final_only = object(), True
    incoming.attach(session)
    async with asyncio.timeout(5):
        await session.ended.wait()
    assert session.failed == "internal error: RuntimeError"
    assert "a utility call failed" in caplog.text


def pairing(fence: int | None, destination: str = "c") -> wire.Pairing:
    return wire.Pairing(destination, f"http://{destination}", 60_000, fence=fence)


async def test_an_order_of_an_older_lease_is_refused_and_changes_nothing(plugin: SimpleNamespace) -> None:
    """A leader that stood still may not know yet that another one leads."""
    llumlet = build_llumlet(plugin, Engine())
    llumlet.pair(pairing(7))
    for late in ((pairing(6, "d"), None), (None, 6)):
        with pytest.raises(plugin.incoming.Refused, match="lease 6"):
            llumlet.pair(*late)
    with pytest.raises(plugin.incoming.Refused, match="lease 6"):
        await llumlet.migrate(wire.MigrateOrder("r", "d", "http://d", fence=6))
    assert llumlet._paired.current(0.0) == pairing(7)
    llumlet.pair(pairing(7, "e"))
    llumlet.pair(None, 8)
    assert llumlet._paired.current(0.0) is None
    with pytest.raises(plugin.incoming.Refused):
        llumlet.pair(pairing(7))


async def test_orders_without_a_lease_are_taken_as_ever(plugin: SimpleNamespace) -> None:
    """Of a gateway that does not know of fences, and of operators."""
    llumlet = build_llumlet(plugin, Engine())
    llumlet.pair(pairing(7))
    llumlet.pair(wire.Pairing.from_json({"destination_id": "d", "destination_url": "http://d", "lease_ms": 1}))
    assert llumlet._paired.current(0.0).destination_id == "d"
    llumlet.pair(None)
    with pytest.raises(plugin.llumlet.NoSuchRequest):
        await llumlet.migrate(wire.MigrateOrder("r", "d", "http://d"))


async def test_a_token_that_cannot_be_one_locks_no_leader_out(plugin: SimpleNamespace) -> None:
    llumlet = build_llumlet(plugin, Engine())
    llumlet.pair(pairing(wire.FENCE_MAX + 1))
    llumlet.pair(pairing(1, "d"))
    assert llumlet._paired.current(0.0).destination_id == "d"


async def test_what_cannot_move_is_counted_by_its_reason_on_the_servers_own_page(plugin: SimpleNamespace) -> None:
    """The engine counts from its start, and tells the same again in each round."""
    blocks: dict[str, Any] = {
        "blocks_total": 8,
        "blocks_free": 8,
        "blocks_reserved": 0,
        "room_blocks": 8,
        "room_places": 2,
    }
    blocks |= {"running_by_class": {}, "waiting_by_class": {}}
    report = {"running": [], "waiting": [], "step_ms": 0.0, "staying": {"n > 1": 2, "LoRA adapter": 1}, **blocks}
    llumlet = build_llumlet(plugin, Engine(report=report))
    llumlet._description = {"block_size": 4, "requests_running_max": 2}

    def counted(reason: str) -> float:
        return REGISTRY.get_sample_value("kvferry_staying_requests_total", {"reason": reason}) or 0

    before = counted("n > 1"), counted("LoRA adapter")
    await llumlet._make_report()
    await llumlet._make_report()
    report["staying"] = {"n > 1": 3, "LoRA adapter": 1}
    await llumlet._make_report()
    assert (counted("n > 1") - before[0], counted("LoRA adapter") - before[1]) == (3, 1)
