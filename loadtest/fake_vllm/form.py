"""What clients ask for and the bytes that they get, as vLLM 0.32 reads and writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from loadtest.sim import tokens
from loadtest.sim.engine import Request

NATURAL_TOKENS = (16, 128)
"""Where a request gives no limit, its output is about so long."""
DONE = b"data: [DONE]\n\n"


class BadRequest(Exception):
    """The client's fault; ``status`` and the parts of vLLM's error body."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.kind, self.param)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A body for one of the two generating endpoints, as far as it is looked at."""

    is_chat: bool
    model: str
    prompt: tuple[int, ...]
    output_tokens_max: int
    has_limit: bool
    stream: bool
    shows_ids: bool
    usage_asked: bool
    usage_runs: bool
    seed: int
    priority: int


def read_body(body: Any, *, is_chat: bool, models: tuple[str, ...], sequence_tokens_max: int) -> Asked:
    """Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    model = body.get("model") or models[0]
    if model not in models:
        raise BadRequest(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")
    if _integer(body, "n", 1) != 1:
        raise BadRequest("this fake makes one choice a request", param="n")
    prompt = tuple(_chat_tokens(body) if is_chat else _prompt_tokens(body))
    if not prompt:
        raise BadRequest("the prompt is empty")
    limit = _limit(body)
    seed = _integer(body, "seed", 0)
    output = limit if limit is not None else _natural_tokens(prompt, seed, sequence_tokens_max - len(prompt))
    if len(prompt) + max(output, 1) > sequence_tokens_max:
        asked = f"{len(prompt)} in the prompt and {output} in the output"
        message = f"This model's maximum context length is {sequence_tokens_max} tokens. You asked for {asked}."
        raise BadRequest(message, param="input_tokens")
    options = body.get("stream_options") or {}
    return Asked(
        is_chat=is_chat,
        model=str(model),
        prompt=prompt,
        output_tokens_max=output,
        has_limit=limit is not None,
        stream=body.get("stream") is True,
        shows_ids=body.get("return_token_ids") is True,
        usage_asked=bool(options.get("include_usage")) if isinstance(options, dict) else False,
        usage_runs=bool(options.get("continuous_usage_stats")) if isinstance(options, dict) else False,
        seed=seed,
        priority=_integer(body, "priority", 0),
    )


def _integer(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise BadRequest(f"{name} must be an integer", param=name)
    return value


def _limit(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            limit = _integer(body, name, 0)
            if limit < 1:
                raise BadRequest(f"{name} must be at least 1, got {limit}.", param=name)
            return limit
    return None


def _natural_tokens(prompt: tuple[int, ...], seed: int, room: int) -> int:
    low, high = NATURAL_TOKENS
    return min(low + tokens.digest(seed, prompt) % (high - low), max(room, 1))


def _chat_tokens(body: dict[str, Any]) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages must be a list of objects", param="messages")
    return tokens.tokenize("".join(f"<{message.get('role')}>{_text(message.get('content'))}" for message in messages))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _prompt_tokens(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokens.tokenize(prompt)
    if isinstance(prompt, list) and all(type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in prompt):
        return prompt
    raise BadRequest("prompt must be one text or one list of token ids", param="prompt")


class Form:
    """The events of one reply. Numbers of tokens are counted from the request's very first one."""

    def __init__(self, asked: Asked, request: Request, request_id: str, created: int) -> None:
        self._asked = asked
        self._request = request
        self._id = ("chatcmpl-" if asked.is_chat else "cmpl-") + request_id
        self._created = created
        kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": created, "model": asked.model}
        self._head = "data: " + _json(head)[:-1] + ',"choices":['

    def events(self, begin: int, end: int) -> bytes:
        """Tokens ``begin`` to ``end``; the first comes with the chat's role."""
        parts = [self._role()] if begin == 0 and end > 0 and self._asked.is_chat else []
        token_ids = self._request.output_token_ids(begin, end)
        parts += [self._token(begin + index, token_id) for index, token_id in enumerate(token_ids)]
        return "".join(parts).encode()

    def ending(self) -> bytes:
        """For a request whose tokens were complete when it came: the finish that is still to be said."""
        return self._event(self._choice("", [], self._request.output_tokens)).encode()

    def closing(self) -> bytes:
        usage = f'{self._head}],"usage":{_json(self._usage(self._request.output_tokens))}}}\n\n'
        return (usage.encode() if self._asked.usage_asked else b"") + DONE

    def whole(self) -> bytes:
        asked, request = self._asked, self._request
        token_ids = request.output_token_ids(0, request.output_tokens)
        text = "".join(map(tokens.text_of, token_ids))
        shown = {"token_ids": token_ids if asked.shows_ids else None}
        choice: dict[str, Any] = {"index": 0}
        choice |= {"message": {"role": "assistant", "content": text}} if asked.is_chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": self._reason(), "stop_reason": None, **shown}
        prompt_ids = list(asked.prompt) if asked.shows_ids else None
        if not asked.is_chat:
            choice["prompt_token_ids"] = prompt_ids
        reply = {
            "id": self._id,
            "object": "chat.completion" if asked.is_chat else "text_completion",
            "created": self._created,
            "model": asked.model,
            "choices": [choice],
            "usage": self._usage(request.output_tokens),
        }
        return _json(reply | ({"prompt_token_ids": prompt_ids} if asked.is_chat else {})).encode()

    def _role(self) -> str:
        prompt_ids = _json(list(self._asked.prompt)) if self._asked.shows_ids else "null"
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._event(choice, f',"prompt_token_ids":{prompt_ids},"prompt_text":null', 0)

    def _token(self, index: int, token_id: int) -> str:
        choice = self._choice(tokens.text_of(token_id), [token_id], index + 1)
        return self._event(choice, count=index + 1)

    def _choice(self, text: str, token_ids: list[int], count: int) -> str:
        """Of the event that brings the output to ``count`` tokens."""
        asked = self._asked
        is_last = count == self._request.output_tokens_max
        reason = f'"{self._reason()}"' if is_last else "null"
        ids = _json(token_ids) if asked.shows_ids else "null"
        if asked.is_chat:
            stop = ',"stop_reason":null' if is_last else ""
            delta = f'{{"content":{_json(text)}}}'
            return f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}{stop},"token_ids":{ids}}}'
        prompt_ids = _json(list(asked.prompt)) if asked.shows_ids and count == 1 else "null"
        return (
            f'{{"index":0,"text":{_json(text)},"logprobs":null,"finish_reason":{reason},"stop_reason":null,'
            f'"prompt_token_ids":{prompt_ids},"token_ids":{ids}}}'
        )

    def _event(self, choice: str, more: str = "", count: int | None = None) -> str:
        if self._asked.usage_runs:
            made = self._request.output_tokens if count is None else count
            more = f',"usage":{_json(self._usage(made))}{more}'
        return f"{self._head}{choice}]{more}}}\n\n"

    def _reason(self) -> str:
        return "length" if self._asked.has_limit else "stop"

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        prompt_tokens = self._request.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
