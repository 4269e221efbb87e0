"""Messages between gateway and llumlet, and the names of headers and stream comments. Standard library only.

Both sides import this module, so that a name is written once. Every ``from_json`` takes what ``json.loads`` returned
and raises :class:`WireError` when a field is missing, of the wrong type or a number that nobody can count with; unknown
fields are ignored, so that a newer peer can say more.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

PROTOCOL_VERSION = 1

SECRET_HEADER = "x-kvferry-secret"
"""The cluster's shared secret: on every llumlet route, and on ``/v1`` requests that a gateway manages."""
REQUEST_ID_HEADER = "x-request-id"
OWN_REQUEST_ID_HEADER = "x-kvferry-request-id"
"""On a gateway's reply: the request's id here and at the instances, whatever the client called it."""
RESUME_HEADER = "x-kvferry-resume"
"""On a resumed leg's request: the id under which the llumlet holds (or will hold) the output tokens so far."""
RESUMED_HEADER = "x-kvferry-resumed"
"""On a resumed leg's reply: ``<resume_id> <output_tokens>``; the body carries only what follows that many tokens."""
BOOT_HEADER = "x-kvferry-boot"
"""On every reply to a managed request: the :attr:`Report.boot_id` of whoever answers. A gateway may not know it yet;
an older plugin does not say it."""
MOVED_HEADER = "x-kvferry-moved"
"""On a non-streamed reply (409) of an instance that the request has left: ``<migration_id> <destination> <tokens>``."""

FENCE_PARAMETER = "fence"
"""Of ``DELETE /llumlet/pairing``: as :attr:`Pairing.fence`."""
FENCE_MAX = 10**12
"""No lease will ever have so high a token: what is above it is a mistake, and ignored."""
ADMIT_HEADER = "x-kvferry-admit"
"""On a managed request, with the value :data:`ADMIT_NOW`: start it now or say busy. It never enters vLLM's own queue to
wait there. Without the header it does, as on any vLLM server. An older plugin does not know it, and queues."""
ADMIT_NOW = "now"
BUSY_HEADER = "x-kvferry-busy"
"""On the answer (409, which vLLM itself never gives to these routes) of an instance that cannot start the request now:
``<blocks needed> <blocks it has for it> <places>``, the first one ``-`` where the prompt was not looked at."""
BUSY_STATUS = 409

COMMENT_PREFIX = b": kvferry "
NUMBER_MAX = 2**53
"""Of every number, and of its negative: beyond it floats and whole numbers are not the same any more."""


class PriorityClass(enum.IntEnum):
    """How urgent a request is. The value is vLLM's ``priority``, where lower means sooner.

    A hundred apart, because vLLM itself counts down from a request's priority for the later turns of a response.
    """

    HIGH = -100
    NORMAL = 0
    LOW = 100

    @property
    def word(self) -> str:
        return self.name.lower()


CLASS_MAX = 1_000


def class_of(priority: int) -> int:
    """The class of a request that vLLM has under ``priority``, as vLLM's own number: of however many there are, a
    hundred apart. What counts down from a class is still of that class."""
    return max(-CLASS_MAX, min(-(-priority // 100) * 100, CLASS_MAX))


def execution_priority(priority: int) -> int:
    """How protected such a request is (policy/picking.py): higher is more, 0 is normal. Its class, the other way
    round."""
    return -class_of(priority)


class WireError(ValueError):
    """A message that does not have the agreed shape."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: Any
    usual: Any
    """What a value is mostly of, exactly: it needs no other check than that of its range."""
    is_number: bool
    required: bool


@functools.cache
def _fields(message: type) -> tuple[_Field, ...]:
    """Made once: 256 instances report 2,560 times a second."""
    hints = typing.get_type_hints(message)
    return tuple(
        _Field(
            field.name,
            hints[field.name],
            _usual(hints[field.name]),
            _usual(hints[field.name]) in _NUMBERS,
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(message)
    )


@functools.cache
def _numbers(message: type) -> tuple[list[str], list[str], Callable[[Any], Iterable[Any]]]:
    """The names of the fields that are numbers, of those that may hold some, and what reads the first ones at once."""
    fields = _fields(message)
    names = [field.name for field in fields if field.is_number]
    others = [field.name for field in fields if field.usual is None]
    # Two names at least, or it would not answer with a tuple.
    values = operator.attrgetter(*names) if len(names) > 1 else lambda one: [getattr(one, name) for name in names]
    return names, others, values


def _usual(kind: Any) -> Any:
    options = typing.get_args(kind) if typing.get_origin(kind) is types.UnionType else (kind,)
    return next((option for option in options if option in _PLAIN), None)


_PLAIN = (str, int, float, bool)
_NUMBERS = (int, float)


@functools.cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _check(value: Any, kind: Any, name: str) -> Any:
    """``value`` as ``kind``, one of: a plain type, ``X | None``, ``list[X]``, ``dict[str, X]`` or a Message."""
    origin, arguments = _shape(kind)
    if origin is types.UnionType:
        options = arguments
        if value is None and types.NoneType in options:
            return None
        return _check(value, next(option for option in options if option is not types.NoneType), name)
    if origin is list:
        if not isinstance(value, list):
            raise WireError(f"{name} must be a list")
        (item,) = arguments
        if item is int:  # Token ids: long lists, so checked in one pass.
            if not all(type(entry) is int for entry in value):
                raise WireError(f"{name} must be a list of integers")
            return value
        return [_check(entry, item, f"{name}[{index}]") for index, entry in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise WireError(f"{name} must be an object")
        _, item = arguments
        return {str(key): _check(entry, item, f"{name}.{key}") for key, entry in value.items()}
    if kind is Any:
        return value
    if isinstance(kind, type) and issubclass(kind, Message):
        return kind.from_json(value)
    _check_range(value, name)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise WireError(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _check_range(value: Any, name: str) -> None:
    """Not a number (NaN), which Python's JSON can say, is in no range."""
    if type(value) in _NUMBERS and not -NUMBER_MAX <= value <= NUMBER_MAX:
        raise WireError(f"{name} is out of range")


class Message:
    """Base of the frozen dataclasses below: to and from what :mod:`json` reads and writes."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return {field.name: _to_json(getattr(self, field.name)) for field in _fields(type(self))}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        if not isinstance(value, dict):
            raise WireError(f"{cls.__name__} must be an object")
        fields: dict[str, Any] = {}
        for field in _fields(cls):  # type: ignore[arg-type]
            name = field.name
            if name in value:
                entry = value[name]
                if type(entry) is not field.usual:
                    entry = _check(entry, field.kind, name)
                elif field.is_number and not -NUMBER_MAX <= entry <= NUMBER_MAX:
                    raise WireError(f"{name} is out of range")
                fields[name] = entry
            elif field.required:
                raise WireError(f"{cls.__name__} lacks {name}")
        return cls(**fields)

    def check_numbers(self) -> None:
        """For one that was not made by :meth:`from_json`. Raises :class:`WireError`."""
        names, others, values = _numbers(type(self))  # type: ignore[arg-type]
        for number in values(self):
            if number is not None and not -NUMBER_MAX <= number <= NUMBER_MAX:
                raise WireError(f"a number out of range among {', '.join(names)}")
        for name in others:
            value = getattr(self, name)
            for message in value if isinstance(value, list) else [value]:
                if isinstance(message, Message):
                    message.check_numbers()
            if isinstance(value, dict):
                for key, entry in value.items():
                    _check_range(entry, f"{name}.{key}")


def _to_json(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Message):
        return value.to_json()
    if isinstance(value, list):
        return [_to_json(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class MigrationTotals(Message):
    """Of all migrations away from an instance since its start, whoever asked for them. Those that were aborted have
    nothing but their number here."""

    committed: int = 0
    aborted: int = 0
    stages: int = 0
    blocks_sent: int = 0
    bytes_sent: int = 0
    duration_ms: float = 0.0
    final_ms: float = 0.0

    def plus(self, result: MigrationResult) -> MigrationTotals:
        if result.outcome != "committed":
            return dataclasses.replace(self, aborted=self.aborted + 1)
        return MigrationTotals(
            self.committed + 1,
            self.aborted,
            self.stages + result.stages,
            self.blocks_sent + result.blocks_sent,
            self.bytes_sent + result.bytes_sent,
            self.duration_ms + result.duration_ms,
            self.final_ms + result.final_ms,
        )


@dataclass(frozen=True, slots=True)
class Report(Message):
    """What a llumlet says about its instance, every 100 ms (paper, section 4.1: virtual usage and freeness).

    Blocks are KV cache blocks of ``block_size`` tokens. Freeness is in decode steps; ``None`` while draining (-inf).
    """

    instance_id: str
    boot_id: str
    sequence: int
    models: list[str]
    vllm_version: str
    plugin_version: str
    protocol_version: int
    kv_format: str | None
    """Key of the KV layout; a KV copy needs equal keys on both sides. ``None``: moves recompute, see ``kv_reason``."""
    kv_reason: str | None
    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_reserved: int
    requests_running: int
    requests_waiting: int
    requests_running_max: int
    running_by_priority: dict[str, int]
    """By class, as :func:`class_of` has it."""
    waiting_by_priority: dict[str, int]
    virtual_usage_blocks: float | None
    """Without headroom, which is the gateways' to add: they know for which classes."""
    freeness_steps: float | None
    head_of_line_blocks: int
    queued_blocks: int
    """Demand of the whole queue, for dispatch; ``head_of_line_blocks`` is the part that virtual usage counts."""
    step_ms: float
    draining: bool
    migrations_in: int
    migrations_out: int
    migrations_ended: MigrationTotals | None = None
    """``None``: a plugin that does not say so yet."""
    fence: int = 0
    """The newest lease of a leader that it has had an order of; a plugin that does not know of fences says 0."""
    room_blocks: int | None = None
    """Blocks that a request which came now could be given for its prompt, after all that is promised already (see
    :func:`gateway.policy.waiting.room`). ``None``: a plugin that does not admit or refuse."""
    room_places: int = 0
    """Requests that could still join the batch."""

    def runs(self, execution_priority: int) -> bool:
        """Whether a request of that class runs there."""
        return self.running_by_priority.get(str(-execution_priority), 0) > 0


@dataclass(frozen=True, slots=True)
class RequestStatus(Message):
    request_id: str
    state: str
    """running, waiting, migrating (this instance is the source) or parked (the destination, before the commit)."""
    prompt_tokens: int
    output_tokens: int
    blocks: int
    movable: bool
    reason: str | None
    """Why it cannot move."""


@dataclass(frozen=True, slots=True)
class Status(Message):
    report: Report
    requests: list[RequestStatus]


@dataclass(frozen=True, slots=True)
class Pairing(Message):
    """The leader's lease for moving requests to ``destination_id``; lapses after ``lease_ms`` unless renewed."""

    destination_id: str
    destination_url: str
    lease_ms: int
    concurrency: int = 1
    """Requests that may be on their way out of the source at a time."""
    fence: int | None = None
    """The token of the leader's lease. A llumlet that has seen a newer one refuses: this leader leads no more."""
    cool_down_s: float | None = None
    """A request that has arrived by a move stays that long. ``None``: a gateway that does not say."""
    moves_max: int | None = None
    """A request that has moved so often stays, unless the source drains. ``None``: no bound."""
    protected: list[int] = dataclasses.field(default_factory=list)
    """Classes with headroom: what is kept free for them is no reason to move them."""


MIGRATION_METHODS = ("live", "blocking", "recompute")
"""``live``: KV is copied while the request decodes on. ``blocking``: it stops, all of its KV is copied, it goes on.
``recompute``: it stops and goes on without a copy. The latter two are there to be compared with."""


@dataclass(frozen=True, slots=True)
class MigrateOrder(Message):
    """Move one request now (``POST /admin/migrate``). ``method`` is one of :data:`MIGRATION_METHODS`."""

    request_id: str
    destination_id: str
    destination_url: str
    method: str = "live"
    fence: int | None = None
    """``None``: an operator's order, which needs no lease."""


@dataclass(frozen=True, slots=True)
class MigrationResult(Message):
    """How one migration went. ``outcome`` is ``committed`` or ``aborted``; times are the source's own."""

    migration_id: str
    request_id: str
    source_id: str
    destination_id: str
    outcome: str
    reason: str | None
    stages: int
    blocks_sent: int
    blocks_reused: int
    """Leading blocks that the destination's prefix cache already held."""
    bytes_sent: int
    output_tokens: int
    duration_ms: float
    final_ms: float
    """From the step boundary at which the source stopped decoding to the destination's acknowledged commit."""


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """A request's output tokens so far, given to an instance that is to go on from there."""

    request_id: str
    output_token_ids: list[int]
    moves: int = 0
    """Of that request before, from instance to instance."""


@dataclass(frozen=True, slots=True)
class Drain(Message):
    draining: bool


@dataclass(frozen=True, slots=True)
class Prebind:
    """Comment: the source has begun to move this stream; open the request at the destination now."""

    migration_id: str
    destination_id: str


@dataclass(frozen=True, slots=True)
class Unbind:
    """Comment: that migration ended without a move; the source goes on."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Comment, and the last thing in the source's stream: go on from the destination's reply."""

    migration_id: str
    destination_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Header: the instance cannot start the request now. ``blocks_needed`` is the truth, where it was found out."""

    blocks_needed: int | None
    room_blocks: int
    room_places: int


StreamComment = Prebind | Unbind | Moved


def encode_comment(comment: StreamComment) -> bytes:
    """An SSE comment with its blank line (WHATWG HTML, section 9.2.6)."""
    match comment:
        case Prebind(migration_id, destination_id):
            words = f"prebind {migration_id} {destination_id}"
        case Unbind(migration_id):
            words = f"unbind {migration_id}"
        case Moved(migration_id, destination_id, output_tokens):
            words = f"moved {migration_id} {destination_id} {output_tokens}"
        case _:
            typing.assert_never(comment)
    return COMMENT_PREFIX + words.encode() + b"\n\n"


def decode_comment(line: bytes) -> StreamComment | None:
    """The comment in an SSE line (without its line ending), or ``None`` if it is not one of ours."""
    if not line.startswith(COMMENT_PREFIX):
        return None
    words = line[len(COMMENT_PREFIX) :].decode("utf-8", "replace").split()
    match words:
        case ["prebind", migration_id, destination_id]:
            return Prebind(migration_id, destination_id)
        case ["unbind", migration_id]:
            return Unbind(migration_id)
        case ["moved", migration_id, destination_id, output_tokens] if is_count(output_tokens):
            return Moved(migration_id, destination_id, int(output_tokens))
        case _:
            return None


def encode_moved_header(moved: Moved) -> str:
    return f"{moved.migration_id} {moved.destination_id} {moved.output_tokens}"


def decode_moved_header(value: str) -> Moved | None:
    comment = decode_comment(COMMENT_PREFIX + b"moved " + value.encode())
    return comment if isinstance(comment, Moved) else None


def encode_busy_header(busy: Busy) -> str:
    needed = "-" if busy.blocks_needed is None else str(busy.blocks_needed)
    return f"{needed} {max(0, busy.room_blocks)} {max(0, busy.room_places)}"


def decode_busy_header(value: str) -> Busy | None:
    match value.split():
        case [needed, blocks, places] if needed == "-" or is_count(needed):
            if not (is_count(blocks) and is_count(places)):
                return None
            return Busy(None if needed == "-" else int(needed), int(blocks), int(places))
        case _:
            return None


def encode_resumed_header(resume_id: str, output_tokens: int) -> str:
    return f"{resume_id} {output_tokens}"


def decode_resumed_header(value: str) -> tuple[str, int] | None:
    match value.split():
        case [resume_id, output_tokens] if is_count(output_tokens):
            return resume_id, int(output_tokens)
        case _:
            return None


def is_count(word: str) -> bool:
    """Whether it is a whole number in decimal digits, and not a long one."""
    return word.isascii() and word.isdecimal() and len(word) <= 12


def is_identifier(value: str) -> bool:
    """Whether ``value`` can be an instance, request or migration id: short, printable, without spaces or slashes."""
    return 0 < len(value) <= 128 and all(char.isascii() and (char.isalnum() or char in "._:-") for char in value)
