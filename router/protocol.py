"""The request bodies of the OpenAI API, as far as they are served.

A field that is missing here is unknown and refused. A field that is here only to be refused (`Raw`,
never parsed) is accepted with the values in a NEUTRAL table, because clients send those by default: they
ask for what happens anyway. `null` is the same as leaving a field out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw

from router.errors import unsupported

T = TypeVar("T")

ABSENT: Final = Raw()


def _absent() -> Raw:
    """A factory, because a default of this kind has no place in the OpenAPI document."""
    return ABSENT


_MAX_NEUTRAL_BYTES: Final = 64
"""No neutral value is longer; what is longer need not be looked at."""
# Nothing that could fit into a context is longer; what is longer is refused before it costs anything.
_Messages = Annotated[list[T], Meta(max_length=1 << 16)]
_Prompt = Annotated[list[T], Meta(max_length=1 << 20)]
_Stops = Annotated[list[str], Meta(max_length=16)]
_StopIds = Annotated[list[int], Meta(max_length=1024)]
_Biases = Annotated[dict[str, float], Meta(max_length=4096)]
_Choices = Annotated[list[str], Meta(max_length=1024)]
_Metadata = Annotated[dict[str, str], Meta(max_length=16)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream reports."""

    include_usage: bool | None = None
    """One more chunk before [DONE] carries the usage; all others carry `usage: null`."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries the usage so far; needs include_usage."""
    include_obfuscation: Raw = msgspec.field(default_factory=_absent)


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `response_format` of type json_schema asks for."""

    name: str
    schema: Raw = msgspec.field(default_factory=_absent)
    description: str | None = None
    strict: bool | None = None
    """The schema is always followed strictly."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to say the form of the answer; the `guided_` fields are its older names."""

    json: Raw = msgspec.field(default_factory=_absent)
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


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
    stop: str | _Stops | None = None
    stop_token_ids: _StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: _Biases | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = msgspec.field(default_factory=_absent)
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None

    # Labels for the client's own books: they change nothing about the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: _Metadata | None = None

    store: Raw = msgspec.field(default_factory=_absent)
    service_tier: Raw = msgspec.field(default_factory=_absent)


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None
    image_url: Raw = msgspec.field(default_factory=_absent)
    input_audio: Raw = msgspec.field(default_factory=_absent)
    file: Raw = msgspec.field(default_factory=_absent)
    refusal: Raw = msgspec.field(default_factory=_absent)


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an assistant called."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    id: str
    function: CalledFunction
    type: str = "function"


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None = any object."""
    strict: bool | None = None
    """Calls follow the schema also where none is demanded."""


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions are served."""

    type: str
    function: FunctionDefinition


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one function that the answer must call."""

    type: str
    function: ChosenFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One turn of a conversation."""

    role: str
    content: str | _Messages[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CalledTool] | None = None

    function_call: Raw = msgspec.field(default_factory=_absent)
    refusal: Raw = msgspec.field(default_factory=_absent)
    audio: Raw = msgspec.field(default_factory=_absent)
    annotations: Raw = msgspec.field(default_factory=_absent)


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: _Messages[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The prompt ends within the last message, and the answer continues it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template."""
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    functions: Raw = msgspec.field(default_factory=_absent)
    function_call: Raw = msgspec.field(default_factory=_absent)
    modalities: Raw = msgspec.field(default_factory=_absent)
    audio: Raw = msgspec.field(default_factory=_absent)
    prediction: Raw = msgspec.field(default_factory=_absent)
    reasoning_effort: Raw = msgspec.field(default_factory=_absent)
    verbosity: Raw = msgspec.field(default_factory=_absent)
    web_search_options: Raw = msgspec.field(default_factory=_absent)


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | _Prompt[str | int | _Prompt[int]]
    logprobs: int | None = None
    best_of: int | None = None
    """Outputs to generate; the n with the highest mean logprob are returned."""
    echo: bool | None = None
    """The answer begins with the prompt."""

    suffix: Raw = msgspec.field(default_factory=_absent)


NEUTRAL_ANYWHERE: Final[Mapping[str, tuple[object, ...]]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
}
NEUTRAL_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_COMPLETION: Final[Mapping[str, tuple[object, ...]]] = {
    "suffix": (),
}
NEUTRAL_MESSAGE: Final[Mapping[str, tuple[object, ...]]] = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
NEUTRAL_PART: Final[Mapping[str, tuple[object, ...]]] = {
    "image_url": (),
    "input_audio": (),
    "file": (),
    "refusal": (),
}
NEUTRAL_STREAM_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}

CHAT_DECODER: Final = msgspec.json.Decoder(ChatBody)
COMPLETION_DECODER: Final = msgspec.json.Decoder(CompletionBody)


def refuse_unserved(
    struct: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raise ApiError 400 for the first field of `neutral` whose value asks for something."""
    for field, harmless in neutral.items():
        raw: Raw = getattr(struct, field)
        if raw is not ABSENT and not _is_neutral(bytes(raw), harmless):
            raise unsupported(prefix + field)


def _is_neutral(raw: bytes, harmless: tuple[object, ...]) -> bool:
    if len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    # Types are compared too: 0 is not False here.
    return value is None or any(value == other and type(value) is type(other) for other in harmless)
