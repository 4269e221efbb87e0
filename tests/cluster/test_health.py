"""Ejection on suspicion: hysteresis both ways, back-off, and a bound on the share."""

from __future__ import annotations

from gateway.cluster.health import HealthSettings
from gateway.cluster.members import Instance, Members, Patience, PlainLoad

SETTINGS = HealthSettings(
    failures_max=3, good_probes_min=2, ejected_first_s=10, ejected_most_s=25, ejected_share_max=0.5, stall_s=30
)
CARDS = [{"id": "m"}]


def plain(name: str, boot_id: str = "1") -> Instance:
    return Instance(name, f"http://{name}", boot_id, managed=False)


def members(*names: str, now: float = 0.0) -> Members:
    known = Members(10.0, 1e9, SETTINGS)
    for name in names:
        known.probed(plain(name), CARDS, True, None, now)
    return known


def usable(known: Members) -> list[str]:
    return [one.instance.instance_id for one in known.all() if one.usable]


def fail(known: Members, name: str, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        known.leg_failed(plain(name), "it failed", refused=False, now=now)


def probe(known: Members, name: str, now: float) -> None:
    known.probed(plain(name), CARDS, True, None, now)


def test_several_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    known = members("a", "b")
    fail(known, "a", 2)
    known.leg_worked(plain("a"))
    fail(known, "a", 2)
    assert usable(known) == ["a", "b"]
    fail(known, "a", 1)
    assert usable(known) == ["b"]


def test_it_comes_back_after_a_time_and_several_good_probes_and_the_time_doubles() -> None:
    known = members("a", "b")
    fail(known, "a", 3, now=0.0)
    for now in (1.0, 2.0, 9.0):
        probe(known, "a", now)
    assert usable(known) == ["b"], "the time is not over"
    probe(known, "a", 11.0)
    assert usable(known) == ["a", "b"]
    fail(known, "a", 1, now=12.0)
    assert usable(known) == ["b"], "one failure is enough just after that"
    for now in (13.0, 23.0, 31.0):
        probe(known, "a", now)
    assert usable(known) == ["b"]
    probe(known, "a", 33.0)
    assert usable(known) == ["a", "b"]


def test_a_bad_probe_makes_the_good_ones_count_from_the_beginning() -> None:
    known = members("a", "b")
    known.lost("http://a", "no answer")
    probe(known, "a", 1.0)
    assert usable(known) == ["b"]
    known.lost("http://a", "no answer")
    probe(known, "a", 2.0)
    assert usable(known) == ["b"]
    probe(known, "a", 3.0)
    assert usable(known) == ["a", "b"]


def test_another_life_is_believed_at_its_first_probe() -> None:
    known = members("a")
    known.lost("http://a", "no answer")
    known.probed(plain("a", "2"), CARDS, True, None, 1.0)
    assert usable(known) == ["a"]


def test_suspicion_never_takes_more_than_a_share_and_a_refused_connection_may_take_all() -> None:
    known = members("a", "b", "c")
    for name in ("a", "b", "c"):
        fail(known, name, 9)
    assert usable(known) == ["b", "c"]
    alone = members("a")
    fail(alone, "a", 9)
    assert usable(alone) == ["a"]
    for name in ("a", "b", "c"):
        known.leg_failed(plain(name), "refused", refused=True, now=0.0)
    assert usable(known) == []


def test_the_share_is_that_of_each_model() -> None:
    known = members("a", "b", "c", "d")
    known.probed(plain("z"), [{"id": "other"}], True, None, 0.0)
    fail(known, "z", 9)
    assert "z" in usable(known), "the only one that serves its model"


def test_failures_of_an_old_life_are_not_the_new_ones() -> None:
    known = members("a", "b")
    known.probed(plain("a", "2"), CARDS, True, None, 1.0)
    fail(known, "a", 9)
    assert usable(known) == ["a", "b"]


def test_no_progress_ejects_while_requests_wait_and_tokens_are_progress() -> None:
    known = members("a", "b")
    known.progressed(plain("a"), 0.0)
    known.silent(plain("a"), 29.0, 29.0)
    known.progressed(plain("a"), 25.0)
    known.silent(plain("a"), 50.0, 50.0)
    assert usable(known) == ["a", "b"]
    known.silent(plain("a"), 60.0, 60.0)
    assert usable(known) == ["b"]


def test_a_reply_is_given_up_when_requests_wait_and_none_runs_and_not_during_a_long_prefill() -> None:
    patience = Patience(1.0, 1e9, 1e9)
    known = members("a")
    known.loaded("http://a", PlainLoad(1, 5, 0.5, 1000, 16, 7.0), 0.0)
    assert known.why_gone(plain("a"), 300.0, patience, 300.0) is None
    known.loaded("http://a", PlainLoad(0, 5, 0.5, 1000, 16, 7.0), 300.0)
    assert known.why_gone(plain("a"), 20.0, patience, 300.0) is None
    assert known.why_gone(plain("a"), 300.0, patience, 300.0) == "has a queue that does not move"
    known.loaded("http://a", PlainLoad(0, 5, 0.5, 1000, 16, 8.0), 300.0)
    assert known.why_gone(plain("a"), 300.0, patience, 301.0) is None


def test_load_that_is_old_or_claims_work_while_nothing_is_computed_is_unknown() -> None:
    known = members("a")
    (member,) = known.all()
    assert not known.knows_load(member, 0.0)
    known.loaded("http://a", PlainLoad(0, 0, 0.0, 1000, 16, 7.0), 0.0)
    assert known.knows_load(member, 5.0)
    assert not known.knows_load(member, 11.0), "not asked for ten seconds"
    frozen = PlainLoad(0, 500, 0.99, 1000, 16, 7.0)
    known.loaded("http://a", frozen, 20.0)
    assert not known.knows_load(member, 20.0)
    known.loaded("http://a", PlainLoad(9, 1, 0.99, 1000, 16, 8.0), 21.0)
    assert known.knows_load(member, 21.0)
