"""Errors of the router. Every one knows the HTTP answer it becomes."""

from typing import Final

import msgspec

MAX_MESSAGE_CHARS: Final = 600
"""Longer messages are cut: a refusal is small whatever it refuses."""
SLOW_CLIENT: Final = "slow_client"
"""Code of an answer that was ended because nobody took it."""
NO_REPLICA_RETRY_AFTER_S: Final = 5
"""A replica with a warm cache starts in seconds; a client that comes back then loses little."""


class NoReplicaError(Exception):
    """No replica can serve now: none is up, or all are draining."""


class ClientGoneError(Exception):
    """The client hung up; there is nobody to answer."""


class SlowClientError(ClientGoneError):
    """The client has stopped reading: it is treated as if it had left."""


class ApiError(Exception):
    """A refusal with its OpenAI error object. Messages name fields and limits, never the input."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow
        """The methods of a 405."""

    def body(self) -> bytes:
        """Encode as {"error": {"message", "type", "param", "code"}}."""
        error = {
            "message": _shortened(self.message, MAX_MESSAGE_CHARS),
            "type": self.type,
            "param": None if self.param is None else _shortened(self.param, 100),
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def bad_value(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """Return a 400 for a field whose value cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str = "is not supported by this server") -> ApiError:
    """Return a 400 for an option that exists elsewhere and is not implemented here."""
    return ApiError(400, f"{param} {reason}", param=param, code="unsupported_parameter")


def context_exceeded(
    param: str, *, limit: int, num_prompt_tokens: int, num_requested: int | None, at_least: bool = False
) -> ApiError:
    """Return the 400 for a prompt, or a prompt and its max_tokens, that do not fit into the context."""
    prompt = f"{'at least ' if at_least else ''}{num_prompt_tokens} in the {param}"
    asked = (
        f"{prompt}, which leaves no room for an answer"
        if num_requested is None
        else f"{num_prompt_tokens + num_requested} tokens ({prompt}, {num_requested} in the completion)"
    )
    message = f"This model's maximum context length is {limit} tokens. However, you requested {asked}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def no_replica() -> ApiError:
    """Return the 503 for a moment without capacity."""
    return ApiError(
        503,
        "no replica can serve this model now",
        type="server_error",
        code="no_replica",
        retry_after_s=NO_REPLICA_RETRY_AFTER_S,
    )


def overloaded(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """Return the 429 for a request that would wait, or has waited, too long in the queue."""
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)


def slow_client() -> ApiError:
    """Return the error event for a client that reads so slowly that its answer was ended."""
    return ApiError(408, "the answer was read too slowly", type="timeout_error", code=SLOW_CLIENT)


def generation_failed(reason: str | None) -> ApiError:
    """Return the 500 (or the error event) for a generation that a replica could not finish."""
    message = reason or "the generation was ended by the server before it was complete"
    return ApiError(500, message, type="server_error", code="generation_failed")


def internal_error() -> ApiError:
    """Return the 500 that gives nothing away; the log has the rest under the request id."""
    return ApiError(500, "internal error; the request id names it in the log", type="server_error")


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
