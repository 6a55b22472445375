"""The OpenAI completion API as a client sees it: request bodies out, stream events in."""

from typing import Any, Final, Literal

import msgspec

from load.errors import ProtocolError

Api = Literal["chat", "completions"]

PATHS: Final[dict[Api, str]] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
DONE: Final = b"[DONE]"

Message = dict[str, str]


class PromptTokensDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the server says the answer cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class StreamEvent(msgspec.Struct):
    """One `data:` of a stream, chat or text. Fields we do not read are skipped while decoding."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """Text of the first choice that this event brings."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        delta = choice.delta
        if delta is None:
            return choice.text or ""
        return delta.content or delta.reasoning_content or delta.reasoning or ""

    @property
    def brings_output(self) -> bool:
        """Whether this event is output. The event that only names the role is not, nor the last one."""
        if self.text:
            return True
        delta = self.choices[0].delta if self.choices else None
        return delta is not None and bool(delta.tool_calls)


decode_event: Final = msgspec.json.Decoder(StreamEvent).decode


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error body, or the beginning of whatever it is, in one line."""
    try:
        text = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        text = body[:200].decode("utf-8", "replace")
    return " ".join(text[:200].split())


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How this run words its requests."""

    api: Api = "chat"
    model: str
    extra_body: dict[str, Any] = {}
    """Merged into every body, last: `ignore_eos`, `temperature`, whatever the server knows."""

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, messages: list[Message], output_tokens: int, extra: dict[str, Any] | None = None) -> bytes:
        """Encode one streaming request. A text completion gets the messages' contents, joined by lines."""
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": output_tokens,
        }
        if self.api == "chat":
            fields["messages"] = messages
        else:
            fields["prompt"] = "\n".join(message["content"] for message in messages)
        return msgspec.json.encode(fields | self.extra_body | (extra or {}))


def parse_event(data: bytes) -> StreamEvent:
    """Decode one event's data. Raises ProtocolError when it is not a JSON object of the expected types."""
    try:
        return decode_event(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"an event is not a completion chunk: {error}") from error
