"""Every failure that the gateway tells a client or an operator about, as one small tree.

``status`` is the HTTP status while nothing has reached the client; later the same error is one event of the stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


class GatewayError(Exception):
    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, code: int | str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = self.status if code is None else code

    @property
    def headers(self) -> dict[str, str]:
        return {}

    @property
    def label(self) -> str:
        """The kind of failure, in metrics and logs: the class, as ``leg_cut``."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """The OpenAI shape; ``code`` is the status unless it says more, as vLLM has it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ConfigError(GatewayError):
    """A setting that cannot be; the message names it."""


class BadRequest(GatewayError):
    status = 400
    kind = "invalid_request_error"


class Unauthorized(GatewayError):
    status = 401
    kind = "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class NotFound(GatewayError):
    status = 404
    kind = "NotFoundError"


class ResponseNotFound(GatewayError):
    """As vLLM says it of a response that it does not hold."""

    status = 404
    kind = "invalid_request_error"

    def __init__(self, response_id: str, why: str = "") -> None:
        super().__init__(f"Response with id '{response_id}' not found.{why}", param="response_id")


class MethodNotAllowed(GatewayError):
    status = 405
    kind = "invalid_request_error"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"allow": self.allowed}


class BodyTimeout(GatewayError):
    status = 408
    kind = "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class Conflict(GatewayError):
    status = 409
    kind = "ConflictError"


class TooLarge(GatewayError):
    status = 413
    kind = "invalid_request_error"


class UnsupportedEncoding(GatewayError):
    status = 415
    kind = "invalid_request_error"


class Cancelled(GatewayError):
    """By an operator. A status that no client's library takes for a reason to try again."""

    status = 499
    kind = "CancelledError"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_cancelled")


class LimitReached(GatewayError):
    """A key has used what it may; ``details`` are headers that say more."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int, details: dict[str, str]) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s
        self._details = details

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s), **self._details}


class NoInstance(GatewayError):
    """The model is known, but nothing can serve it now."""

    status = 503
    kind = "ServiceUnavailableError"
    RETRY_AFTER_S = 2

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.RETRY_AFTER_S)}


class Overloaded(NoInstance):
    """There are instances for it, with too many requests before it. Said before any byte of a reply."""


class ShuttingDown(NoInstance):
    """This gateway ends."""


class RequestTimeout(GatewayError):
    """The whole request took too long, however healthy it was."""

    status = 504
    kind = "GatewayTimeoutError"


class StoreUnavailable(GatewayError):
    """Redis does not answer. Never raised on a request's path."""

    status = 503
    kind = "ServiceUnavailableError"


@dataclass(frozen=True, slots=True)
class WholeReply:
    """An instance's complete reply, to be passed on byte for byte."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class LegError(GatewayError):
    """An instance's reply that cannot be used any further.

    ``instance_at_fault``: do not send this request there again. ``reply``: what the instance said, if anything; and
    ``event``, the same as the event of a stream.
    """

    status = 502
    kind = "BadGatewayError"
    is_death = True
    """The instance had the request when it failed, so that the request may be what it failed of."""

    def __init__(
        self,
        instance_id: str,
        message: str,
        *,
        instance_at_fault: bool = True,
        reply: WholeReply | None = None,
        event: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.instance_id = instance_id
        self.instance_at_fault = instance_at_fault
        self.reply = reply
        self.event = event


class LegUnreachable(LegError):
    """No connection: the instance has not seen the request."""

    is_death = False
    is_refused = False
    """Nobody listens at its address."""


class LegRefused(LegError):
    """The instance is there, but too busy or on its way out."""

    is_death = False


class LegCut(LegError):
    """The connection ended early, or what came was not HTTP."""


class LegTimeout(LegError):
    status = 504
    kind = "GatewayTimeoutError"


class LegNotConnected(LegTimeout):
    """A connection did not come about in time: the instance has not seen the request."""

    is_death = False


class ResumeFailed(LegError):
    """The instance answered, but does not hold the tokens that it should go on from."""

    is_death = False


class LlumletUnreachable(GatewayError):
    status = 502
    kind = "BadGatewayError"


class LlumletTimeout(LlumletUnreachable):
    """No answer on a connection: dead, in the middle of a long engine step, or on a machine that stalled."""


class LlumletRefused(GatewayError):
    """A llumlet's own error answer, kept as it was said."""

    status = 502
    kind = "BadGatewayError"

    def __init__(self, status: int, message: str, code: int | str | None) -> None:
        super().__init__(message, code=code)
        self.llumlet_status = status
