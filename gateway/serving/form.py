"""Reads the few fields of a form that matter here. Its files are passed over, neither decoded nor copied."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest
from gateway.openai.body import check_form_field, is_true_text, read_model_field

PARTS_MAX = 1_000
"""As the form parser of vLLM's server."""
FIELD_BYTES_MAX = 1024 * 1024
SLICE_BYTES = 1024 * 1024
"""Between two slices others get their turn: half a millisecond each."""


@dataclass(frozen=True, slots=True)
class Form:
    model: str | None
    stream: bool


async def read_form(content_type: str, body: bytes) -> Form:
    """Raises :class:`BadRequest` for what is no form, and for fields that are the gateway's own."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise BadRequest("Unsupported Media Type: Only 'multipart/form-data' is allowed.")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 256:
        raise BadRequest("The form's boundary is missing or too long.")
    fields = _Fields()
    try:
        parser = MultipartParser(boundary, fields.callbacks())  # type: ignore[arg-type]
        for at in range(0, len(body), SLICE_BYTES):
            parser.write(body[at : at + SLICE_BYTES])
            await asyncio.sleep(0)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest("The request body is not a valid form.") from error
    if not fields.ended:
        raise BadRequest("The form ends before its last boundary.")
    return Form(read_model_field(fields.model), is_true_text(fields.stream))


class _Fields:
    """What the parser calls for each part. Of several fields of one name the last counts, as it does at vLLM."""

    def __init__(self) -> None:
        self.model = b""
        self.stream = b""
        self.ended = False
        self._parts = 0
        self._header = b""
        self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadRequest(f"The form has more than {PARTS_MAX} parts.")
        self._disposition = b""
        self._value.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise BadRequest("A part of the form has no name.")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = b"filename" in options

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            return
        if len(self._value) + end - start > FIELD_BYTES_MAX:
            raise BadRequest(f"A field of the form is larger than {FIELD_BYTES_MAX} bytes.")
        self._value += data[start:end]

    def _on_part_end(self) -> None:
        value = bytes(self._value)
        check_form_field(self._name, value)
        if self._is_file:
            return
        if self._name == "model":
            self.model = value
        elif self._name == "stream":
            self.stream = value

    def _on_end(self) -> None:
        self.ended = True
