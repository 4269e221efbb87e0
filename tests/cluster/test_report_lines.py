"""Reports are read by msgspec for speed: it must take and refuse what ``Report.from_json`` does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import wire
from gateway.cluster.report_lines import REPORT_BYTES_MAX, ReportLines, read_report, read_status
from tests.cluster.test_views import REPORT as PLAIN

REPORT = {**PLAIN.to_json(), "migrations_ended": wire.MigrationTotals(committed=3).to_json()}
FIELDS = [field.name for field in dataclasses.fields(wire.Report)]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-wire.NUMBER_MAX, wire.NUMBER_MAX),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=2), max_size=2),
)


def slow(line: bytes) -> wire.Report:
    return wire.Report.from_json(json.loads(line))


@given(st.dictionaries(st.sampled_from([*FIELDS, "unknown"]), VALUES, max_size=3), st.sets(st.sampled_from(FIELDS)))
def test_a_report_is_read_as_its_contract_says(changes: dict[str, Any], missing: set[str]) -> None:
    fields = {**REPORT, **changes}
    for name in list(missing)[:1]:
        fields.pop(name, None)
    line = json.dumps(fields).encode()
    try:
        expected = slow(line)
    except wire.WireError:
        with pytest.raises(wire.WireError):
            read_report(line)
    else:
        assert read_report(line) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks_free": 2**54},
        {"freeness_steps": -1e300},
        {"running_by_priority": {"0": 2**60}},
        {"migrations_ended": {"bytes_sent": 2**60}},
    ],
)
def test_a_number_that_nobody_can_count_with_is_refused_wherever_it_stands(changes: dict[str, Any]) -> None:
    report = {**REPORT, **changes}
    with pytest.raises(wire.WireError):
        wire.Report.from_json(report)
    with pytest.raises(wire.WireError):
        read_report(json.dumps(report).encode())
    with pytest.raises(wire.WireError):
        read_status(json.dumps({"report": report, "requests": []}).encode())


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(wire.WireError):
        read_report(line)


@given(st.lists(st.integers(1, 400), max_size=30))
def test_reports_come_in_order_however_they_were_cut(pieces: list[int]) -> None:
    data = b"".join(json.dumps({**REPORT, "sequence": sequence}).encode() + b"\n" for sequence in range(5))
    taken: list[int] = []
    lines = ReportLines(lambda report: taken.append(report.sequence))
    for length in [*pieces, len(data)]:
        piece, data = data[:length], data[length:]
        if piece and not lines.feed_at_once(piece):
            lines.feed(piece)
    assert taken == [0, 1, 2, 3, 4]


def test_a_line_without_an_end_is_given_up() -> None:
    lines = ReportLines(lambda report: None)
    lines.feed(b"a" * REPORT_BYTES_MAX)
    assert not lines.feed_at_once(b"a")
    with pytest.raises(ValueError, match="more than"):
        lines.feed(b"a")
