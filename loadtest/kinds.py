"""Every kind of request that the soak sends, as data: each of them must give the same output however often it moves.

All are greedy or seeded, so that a kind has one right output, its twin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    path: str
    body: dict[str, Any]
    """Without ``model``, ``stream`` and ``return_token_ids``."""
    stream: bool = True
    shows_tokens: bool = True
    """Whether the client asks for token ids."""
    moves: bool = True
    """False: it stays where it began (docs/what-cannot-move.md), and only has to be right."""
    resumes: bool = True
    """False: a stream that has begun ends with one error event when its server dies."""

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT

    def request(self, model: str) -> dict[str, Any]:
        shown = {"return_token_ids": True} if self.shows_tokens else {}
        return {"model": model, "stream": self.stream, **shown, **self.body}


MESSAGES = [{"role": "user", "content": "Tell me about ferries, please."}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 240}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 7}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
USAGE_ALL_ALONG: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

NUMBERS_TOTAL = 36
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 10, "maximum": 99},
    "minItems": NUMBERS_TOTAL,
    "maxItems": NUMBERS_TOTAL,
}
SCHEMA = {
    "type": "object",
    "properties": {"numbers": NUMBERS, "kind": {"enum": ["boat", "ferry"]}},
    "required": ["numbers", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True}}
LINES = r"(line [0-9]{3}\n){30}"
LINES_AND_END = r"(line [0-9]{3}\n){24}the end of the lines\n(line [0-9]{3}\n){16}"
GRAMMAR = 'root ::= line+\nline ::= ("ferry" | "boat" | "river") " " [0-9]+ "\\n"\n'
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 300}

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Sails.", "parameters": SCHEMA}}
    for name in ("sail", "row")
]
CALL = (
    r'<tool_call>\n\{"name": "(sail|row)", "arguments": \{"numbers": \[([1-9][0-9], ){30}[1-9][0-9]\]\}\}\n</tool_call>'
)
"""Valid JSON. Of other text, as of numbers that begin with 0, vLLM makes what depends on how the tokens come."""
THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}, "skip_special_tokens": False}
"""Markup is shown: vLLM's parser looks for </think> in the text when that comes together with the next token, as it
does where tokens come in bursts, and loses the token when it was left out."""
TWO_LETTER_STOPS = ["s t", "e s", "d w", "r a"]
"""Each begins in one word and ends in the next: one of them comes soon, and as a rule across two tokens."""


def build_kinds(think_end_token_id: int) -> list[Kind]:
    """``think_end_token_id``: of ``</think>``, which the model says only where it is biased to."""
    kinds = [*_chats(), *_completions(), *_tools(), *_thinking(think_end_token_id), *_staying()]
    return kinds + [_whole(kind) for kind in kinds if kind.name in WHOLE_TOO]


def _chats() -> list[Kind]:
    bodies: dict[str, dict[str, Any]] = {
        "chat, greedy": {**GREEDY, **USAGE},
        "chat, seeded": {**SEEDED, "top_p": 0.95},
        "chat, logprobs": {**GREEDY, "logprobs": True, "top_logprobs": 3},
        "chat, seeded, logprobs, usage in every event": {**SEEDED, "logprobs": True, "top_logprobs": 1}
        | USAGE_ALL_ALONG,
        "chat, usage not asked for": {**GREEDY, "stream_options": {"include_usage": False}},
        "chat, cache_salt": {**GREEDY, **USAGE, "cache_salt": "tenant-1"},
        "chat, stop strings": {**SEEDED, **USAGE, "stop": TWO_LETTER_STOPS, "min_tokens": 90},
        "chat, to its natural end": {"temperature": 1.0, "seed": 31, "max_tokens": 400, **USAGE},
        "chat, json_schema": {**LONG, **USAGE, "response_format": JSON_SCHEMA},
        "chat, json_object": {**LONG, **USAGE, "response_format": {"type": "json_object"}},
        "chat, regex, seeded": {**LONG, "temperature": 1.0, "seed": 5, "structured_outputs": {"regex": LINES}},
    }
    kinds = [Kind(name, CHAT, {"messages": MESSAGES, **body}) for name, body in bodies.items()]
    plain = {"messages": MESSAGES, **GREEDY, **USAGE}
    said = [*MESSAGES, {"role": "assistant", "content": "The ferry"}]
    echo = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}
    return [
        *kinds,
        Kind("chat, token ids not asked for", CHAT, plain, shows_tokens=False),
        Kind("chat, echo", CHAT, {"messages": said, **GREEDY, **echo}),
    ]


def _completions() -> list[Kind]:
    bodies: dict[str, dict[str, Any]] = {
        "completion, greedy": {"prompt": "The ferry", **GREEDY, **USAGE},
        "completion, token ids as prompt": {"prompt": list(range(20, 90)), **GREEDY},
        "completion, penalties and min_tokens": {
            "prompt": "Over the river",
            **GREEDY,
            "presence_penalty": 0.6,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
            "min_tokens": 120,
        },
        "completion, penalties, seeded": {
            "prompt": "Down the river",
            **SEEDED,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.1,
        },
        "completion, seeded, top_p and top_k": {
            "prompt": "Dice",
            **GREEDY,
            "temperature": 1.2,
            "seed": 1234567,
            "top_p": 0.95,
            "top_k": 50,
        },
        "completion, seeded, min_p": {"prompt": "More dice", **SEEDED, "seed": 2**40 + 3, "min_p": 0.02},
        "completion, logprobs": {"prompt": "Numbers", **GREEDY, "logprobs": 2},
        "completion, seeded, logprobs": {"prompt": "Numbers", **SEEDED, "logprobs": 0, **USAGE},
        "completion, logit_bias": {"prompt": "Leaning", **GREEDY, "logit_bias": {"300": 4.0, "301": -50, "500": 6.0}},
        "completion, bad_words and allowed_token_ids": {
            "prompt": "Some",
            **GREEDY,
            "bad_words": ["the"],
            "allowed_token_ids": list(range(100, 900)),
        },
        "completion, echo": {"prompt": "Say it again, and go on", **GREEDY, "echo": True, **USAGE},
        "completion, usage in every event": {"prompt": "Count", **GREEDY, **USAGE_ALL_ALONG},
        "completion, cache_salt": {"prompt": "Salt " * 100, **GREEDY, "cache_salt": "tenant-2"},
        "completion, stop strings": {"prompt": "Stop", **GREEDY, "stop": TWO_LETTER_STOPS, "min_tokens": 100, **USAGE},
        "completion, include_stop_str_in_output": {
            "prompt": "Stop and say so",
            **SEEDED,
            "stop": TWO_LETTER_STOPS,
            "min_tokens": 100,
            "include_stop_str_in_output": True,
            "logprobs": 1,
        },
        "completion, stop string in a grammar": {
            "prompt": "Lines",
            **LONG,
            "structured_outputs": {"regex": LINES_AND_END},
            "stop": ["end of the"],
            "include_stop_str_in_output": True,
            **USAGE,
        },
        "completion, a stop string that never comes": {"prompt": "Held back", **GREEDY, "stop": ["x" * 64]},
        "completion, stop_token_ids": {
            "prompt": "Halt",
            **SEEDED,
            "stop_token_ids": list(range(400, 440)),
            "min_tokens": 80,
        },
        "completion, special tokens shown": {"prompt": "Special", **SEEDED, "skip_special_tokens": False},
        "completion, a prompt of 60 blocks": {"prompt": "river " * 1900, **GREEDY, **USAGE},
        "completion, a prompt of 3000 tokens": {
            "prompt": [100 + index * 7 % 1500 for index in range(3000)],
            **SEEDED,
            **USAGE,
        },
        "completion, json": {"prompt": "Numbers", **LONG, "structured_outputs": {"json": SCHEMA}},
        "completion, regex": {"prompt": "Lines", **LONG, "structured_outputs": {"regex": LINES}},
        "completion, choice": {
            "prompt": "Choose",
            **LONG,
            "structured_outputs": {"choice": ["a ferry " * 40, "one boat " * 40]},
        },
        "completion, grammar": {"prompt": "Grammar", **LONG, "structured_outputs": {"grammar": GRAMMAR}, **USAGE},
        "completion, 800 tokens": {"prompt": "A long story", **GREEDY, "max_tokens": 800, **USAGE},
    }
    return [Kind(name, COMPLETIONS, body) for name, body in bodies.items()]


def _tools() -> list[Kind]:
    choices: dict[str, dict[str, Any]] = {
        "auto": {"tool_choice": "auto", "structured_outputs": {"regex": f"Aye, captain. {CALL}"}},
        "parallel": {"tool_choice": "auto", "structured_outputs": {"regex": f"{CALL}\n{CALL}"}},
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": {"type": "function", "function": {"name": "row"}}},
        "none": {"tool_choice": "none"},
    }
    common = {"messages": MESSAGES, **LONG, "tools": TOOLS, **USAGE}
    return [Kind(f"tools, {name}", CHAT, {**common, **choice}) for name, choice in choices.items()]


def _thinking(think_end_token_id: int) -> list[Kind]:
    ends = {"temperature": 1.0, "seed": 3, "logit_bias": {str(think_end_token_id): 6.0}}
    thinking = {"messages": MESSAGES, **GREEDY, "max_tokens": 400, **THINKING, **ends, **USAGE}
    grammar = {"messages": MESSAGES, **LONG, **THINKING, **ends, "structured_outputs": {"regex": LINES}}
    hidden = {**thinking, "include_reasoning": False}
    return [
        Kind("reasoning", CHAT, thinking),
        Kind("reasoning, then a grammar", CHAT, grammar),
        # Nobody but vLLM knows the tokens that are not shown.
        Kind("reasoning, hidden", CHAT, hidden, resumes=False),
    ]


def _staying() -> list[Kind]:
    """They stay where they are, and have to be right there."""
    two = {"messages": MESSAGES, **SEEDED, "max_tokens": 120, "n": 2}
    prompts = {"prompt": ["One boat", "Two boats", "No boat"], **GREEDY, "max_tokens": 100}
    prompt_logprobs = {"prompt": "Looking back " * 10, **GREEDY, "prompt_logprobs": 2}
    return [
        Kind("n=2", CHAT, {**two, **USAGE}, moves=False, resumes=False),
        Kind("several prompts", COMPLETIONS, prompts, moves=False, resumes=False),
        Kind("prompt_logprobs", COMPLETIONS, prompt_logprobs, stream=False, moves=False),
        Kind("n=2, whole", CHAT, two, stream=False, moves=False),
        Kind("several prompts, whole", COMPLETIONS, prompts, stream=False, moves=False),
    ]


WHOLE_TOO = (
    "chat, greedy",
    "chat, seeded, logprobs, usage in every event",
    "chat, json_schema",
    "completion, stop strings",
    "completion, logprobs",
    "completion, echo",
    "completion, a prompt of 3000 tokens",
    "tools, parallel",
    "tools, required",
    "reasoning",
    "reasoning, hidden",
)


def _whole(kind: Kind) -> Kind:
    body = {name: value for name, value in kind.body.items() if name != "stream_options"}
    return replace(kind, name=f"{kind.name}, whole", body=body, stream=False, resumes=True)
