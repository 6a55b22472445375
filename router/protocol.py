"""The request bodies of the OpenAI API, as far as they are served.

A field that is missing here is unknown and refused. A field that is here only to be refused (`Any`)
is accepted with the values in a NEUTRAL table, because clients send those by default: they ask for
what happens anyway. `null` is the same as leaving a field out.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from router.errors import unsupported


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream reports."""

    include_usage: bool | None = None
    """One more chunk before [DONE] carries the usage; all others carry `usage: null`."""
    include_obfuscation: Any = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None

    # Labels for the client's own books: they change nothing about the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    store: Any = None
    service_tier: Any = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    echo: Any = None
    best_of: Any = None
    suffix: Any = None


NEUTRAL_ANYWHERE: Final[Mapping[str, tuple[object, ...]]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
}
NEUTRAL_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_COMPLETION: Final[Mapping[str, tuple[object, ...]]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": (),
}
NEUTRAL_MESSAGE: Final[Mapping[str, tuple[object, ...]]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
NEUTRAL_STREAM_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}

CHAT_DECODER: Final = msgspec.json.Decoder(ChatBody)
COMPLETION_DECODER: Final = msgspec.json.Decoder(CompletionBody)


def refuse_unserved(
    struct: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raise ApiError 400 for the first field of `neutral` whose value asks for something."""
    for field, harmless in neutral.items():
        value = getattr(struct, field)
        # Types are compared too: 0 is not False here.
        if value is None or any(value == other and type(value) is type(other) for other in harmless):
            continue
        raise unsupported(prefix + field)
