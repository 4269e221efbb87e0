"""How long things take on a certain model and GPU: engine steps, and what a migration costs. To and from JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ProfileError(ValueError):
    """A profile that cannot be read; the message names the field."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients in milliseconds.

    A step that computes prompts only takes ``prefill_base_ms + prefill_token_ms * n + prefill_square_ms * n^2`` for n
    tokens from a sequence's start on; one that decodes only takes ``decode_base_ms + decode_request_ms * requests +
    decode_kv_token_ms * KV tokens``. A step with both takes the longer of the two bases, which is what the decodes' and
    the prompts' way through the weights share, and the decodes' own parts beside it.
    """

    name: str
    prefill_base_ms: float
    prefill_token_ms: float
    prefill_square_ms: float
    decode_base_ms: float
    decode_request_ms: float
    decode_kv_token_ms: float
    step_floor_ms: float = 0.0
    """No step is shorter."""
    kv_bytes_per_token: int = 524_288
    copy_bytes_per_s: float = 2.56e9
    copy_slowdown: float = 0.02
    """By this part a step takes longer while blocks are copied from or to its instance."""
    downtime_base_ms: float = 0.0
    """Live migration: between the last token at the source and the destination's step, apart from that step."""
    downtime_token_ms: float = 0.0
    request_ms: float = 0.0
    """A request's way to the engine and back, beside its steps."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ProfileError(f"{field.name} must be a number that is not negative")
        if self.copy_bytes_per_s == 0:
            raise ProfileError("copy_bytes_per_s must not be 0")
        if self.prefill_base_ms + self.prefill_token_ms + self.step_floor_ms == 0:
            raise ProfileError("a step that takes no time would never end: give prefill_token_ms or step_floor_ms")
        if self.decode_base_ms + self.decode_request_ms + self.step_floor_ms == 0:
            raise ProfileError("a step that takes no time would never end: give decode_base_ms or step_floor_ms")

    def step_ms(self, prefills: Iterable[tuple[int, int]], decodes: int, kv_tokens: int) -> float:
        """``prefills``: of each prompt, the tokens before this step and those in it. ``kv_tokens``: of the decodes."""
        prefill_ms = 0.0
        for before, count in prefills:
            after = before + count
            prefill_ms += self.prefill_token_ms * count + self.prefill_square_ms * (after * after - before * before)
        if prefill_ms > 0:
            prefill_ms += self.prefill_base_ms
        if decodes == 0:
            return max(prefill_ms, self.step_floor_ms)
        decode_ms = self.decode_request_ms * decodes + self.decode_kv_token_ms * kv_tokens
        return max(max(prefill_ms, self.decode_base_ms) + decode_ms, self.step_floor_ms)

    def copy_s(self, tokens: int) -> float:
        """Copying the KV of that many tokens."""
        return tokens * self.kv_bytes_per_token / self.copy_bytes_per_s

    def downtime_s(self, tokens: int) -> float:
        return (self.downtime_base_ms + self.downtime_token_ms * tokens) / 1000

    def faster(self, factor: float) -> Profile:
        """The same hardware in fast motion."""
        times = {
            field.name: getattr(self, field.name) / factor
            for field in dataclasses.fields(self)
            if field.name.endswith("_ms")
        }
        return dataclasses.replace(self, **times, copy_bytes_per_s=self.copy_bytes_per_s * factor)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """Raises ProfileError. What the values were ``measured`` from may stand beside them."""
        if not isinstance(value, dict):
            raise ProfileError("a profile must be an object")
        value = {name: part for name, part in value.items() if name != "measured"}
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in value:
            if name not in known:
                raise ProfileError(f"a profile has no {name}")
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in value:
                raise ProfileError(f"the profile lacks {name}")
        return cls(**value)


LLAMA_7B_A10 = Profile(
    name="llama-7b-a10",
    prefill_base_ms=5.58,
    prefill_token_ms=0.2028,
    prefill_square_ms=5.09e-6,
    decode_base_ms=38.0,
    decode_request_ms=0.60,
    decode_kv_token_ms=1.25e-3,
    downtime_base_ms=12.6,
    downtime_token_ms=0.00176,
)
"""LLaMA-7B on an A10 as the paper's figures give it: prefill measured, decode calibrated to the means of Fig. 11, copy
and downtime from Fig. 10 (whose steps are 2 % longer while a migration runs)."""

LLAMA_7B_A100 = Profile(
    name="llama-7b-a100",
    prefill_base_ms=4.31,
    prefill_token_ms=0.0492,
    prefill_square_ms=1.63e-6,
    decode_base_ms=9.79,
    decode_request_ms=0.0358,
    decode_kv_token_ms=3.126e-4,
    step_floor_ms=9.8,
    downtime_base_ms=12.6,
    downtime_token_ms=0.00176,
)
"""A second hardware: least squares over composed step times (98 decode points, 3 % mean error; prompts of 256 tokens
and more, 2 %). What a migration costs is taken over from the A10."""

FAST = Profile(
    name="fast",
    prefill_base_ms=0.5,
    prefill_token_ms=0.002,
    prefill_square_ms=0.0,
    decode_base_ms=2.0,
    decode_request_ms=0.01,
    decode_kv_token_ms=0.0,
    kv_bytes_per_token=4096,
    copy_bytes_per_s=1e9,
)
"""For tests, in which a token is to take a few milliseconds."""

PRESETS = {profile.name: profile for profile in (LLAMA_7B_A10, LLAMA_7B_A100, FAST)}


def load_profile(name_or_path: str) -> Profile:
    """A preset by its name, or a JSON file. Raises ProfileError."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    try:
        return Profile.from_json(json.loads(Path(name_or_path).read_text()))
    except OSError as error:
        raise ProfileError(f"{name_or_path} is no profile: name {', '.join(PRESETS)} or a JSON file") from error
    except ValueError as error:
        raise ProfileError(f"{name_or_path}: {error}") from error
