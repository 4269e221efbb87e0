"""Replies of an instance that the official clients, in Python and in Node, have to make the same of."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from tests.fake_instance import MODEL, Exchange, Script, error_body
from tests.scripts import answers


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def call(index: int, arguments: str, name: str | None = None) -> bytes:
    begins = {"id": f"call_{index}", "type": "function"} if name else {}
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return chunk({"tool_calls": [{"index": index, **begins, "function": function}]})


TOOL_CALLS = [["weather", '{"city": "Łódź"}'], ["weather", "{}"]]
EMBEDDINGS = [[0.5, -2.0], [1.0, 0.25]]

calls_tools: Script = answers(
    chunk({"role": "assistant", "content": ""}),
    *(call(0, "", "weather"), call(0, '{"city": '), call(0, '"Łódź"}'), call(1, "", "weather"), call(1, "{}")),
    chunk({}, "tool_calls"),
)
breaks_in_its_stream: Script = answers(
    chunk({"role": "assistant", "content": "x"}),
    b"data: " + json.dumps(error_body("queue full", "Busy", 503)).encode() + b"\n\n",
)


async def follows_a_schema(exchange: Exchange) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": '{"n": 7}'}, "finish_reason": "stop"}
    reply = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
    await exchange.json(200, reply)


async def embeds(exchange: Exchange) -> None:
    """As the clients ask for it: they write numbers as base64."""
    data = [
        {"object": "embedding", "index": index, "embedding": base64.b64encode(struct.pack("<2f", *row)).decode()}
        for index, row in enumerate(EMBEDDINGS)
    ]
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    await exchange.json(200, {"object": "list", "model": MODEL, "data": data, "usage": usage})


def response(response_id: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": "hi", "annotations": []}]
    output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}]
    return {"id": response_id, "object": "response", "status": "completed", "model": MODEL, "output": output}


async def responds(exchange: Exchange) -> None:
    request = exchange.request
    if request.method == "POST" and request.json.get("stream"):
        await exchange.start()
        for number, kind in enumerate(("response.created", "response.completed")):
            event = {"type": kind, "sequence_number": number, "response": response("resp_2")}
            await exchange.send(f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode())
        await exchange.finish()
    else:
        await exchange.json(200, response("resp_1"))
