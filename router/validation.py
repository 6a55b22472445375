"""Checks of request fields that need no tokenizer; every failure is a 400 that names field and range."""

from typing import Final

import msgspec

from replicas.api import ModelCard
from router.errors import ApiError, bad_value, unsupported
from router.protocol import (
    NEUTRAL_ANYWHERE,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    NEUTRAL_PART,
    NEUTRAL_STREAM_OPTIONS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    refuse_unserved,
)

MAX_N: Final = 128
MAX_CHOICES: Final = 1024
"""Prompts times n in one completions request."""
MAX_STOP_CHARS: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 5
MIN_SEED: Final = -(2**63)
MAX_SEED: Final = 2**63 - 1
ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("n", 1, MAX_N),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0, 1),
    ("seed", MIN_SEED, MAX_SEED),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    # Outside of these a float32 logit can become infinite, and a row of NaN probabilities follows.
    ("repetition_penalty", 0.01, 100),
)


def check_model(model: str | None, card: ModelCard) -> None:
    """Raise the 404 for a model that is not served. No model named = the one that is."""
    if model is not None and model != card.name:
        message = f"the model does not exist here; served: {card.name}"
        raise ApiError(404, message, param="model", code="model_not_found")


def check_chat(body: ChatBody, card: ModelCard) -> None:
    """Check everything about a chat request but the length of its prompt."""
    _check_common(body, card)
    refuse_unserved(body, NEUTRAL_CHAT)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_value("max_tokens", "max_tokens and max_completion_tokens cannot both be set")
    _check_max_tokens("max_completion_tokens", body.max_completion_tokens, body.min_tokens)
    if body.top_logprobs is not None:
        _check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise bad_value("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    if not body.messages:
        raise bad_value("messages", "messages must hold at least one message")
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}]")
    _check_continuation(body)


def check_completion(body: CompletionBody, card: ModelCard) -> None:
    """Check everything about a completions request but its prompts."""
    _check_common(body, card)
    refuse_unserved(body, NEUTRAL_COMPLETION)
    if body.best_of is not None:
        _check_range("best_of", body.best_of, body.n or 1, MAX_N)
        if body.stream and body.best_of != (body.n or 1):
            raise bad_value("best_of", "best_of greater than n cannot be streamed")
    if body.logprobs is not None:
        _check_range("logprobs", body.logprobs, 0, MAX_COMPLETION_LOGPROBS)


def check_token_ids(param: str, ids: list[int], card: ModelCard) -> None:
    """Raise a 400 that names the first id outside of the vocabulary."""
    # min and max run in C: a legal prompt is never walked in Python.
    if not ids or (min(ids) >= 0 and max(ids) < card.vocab_size):
        return
    bad = next(token_id for token_id in ids if not 0 <= token_id < card.vocab_size)
    raise bad_value(param, f"{param} has token id {_brief(bad)}; ids must be in [0, {card.vocab_size - 1}]")


def num_outputs(body: ChatBody | CompletionBody) -> int:
    """Return how many outputs are generated per prompt."""
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    return best_of or body.n or 1


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """Return the stop strings as a tuple, in the order given."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _check_common(body: GenerationBody, card: ModelCard) -> None:
    refuse_unserved(body, NEUTRAL_ANYWHERE)
    for field, low, high in _RANGES:
        value = getattr(body, field)
        if value is not None:
            _check_range(field, value, low, high)
    _check_stream_options(body)
    echoes = isinstance(body, CompletionBody) and bool(body.echo)
    _check_max_tokens("max_tokens", body.max_tokens, body.min_tokens, least=0 if echoes else 1)
    if body.min_tokens is not None and not 0 <= body.min_tokens < card.max_model_len:
        raise bad_value("min_tokens", f"min_tokens must be in [0, {card.max_model_len - 1}]")
    _check_stops(body, card)
    _check_logit_bias(body, card)


def _check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is None:
        return
    refuse_unserved(body.stream_options, NEUTRAL_STREAM_OPTIONS, "stream_options.")
    if not body.stream:
        raise bad_value("stream_options", "stream_options is only allowed when stream is true")
    if body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
        param = "stream_options.continuous_usage_stats"
        raise bad_value(param, f"{param} needs include_usage")


def _check_max_tokens(param: str, max_tokens: int | None, min_tokens: int | None, least: int = 1) -> None:
    if max_tokens is None:
        return
    if max_tokens < least:
        raise bad_value(param, f"{param} must be at least {least}, not {_brief(max_tokens)}")
    if min_tokens is not None and min_tokens > max_tokens:
        raise bad_value("min_tokens", f"min_tokens must not be greater than {param}")


def _check_stops(body: GenerationBody, card: ModelCard) -> None:
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stop_strings(body)):
        raise bad_value("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    check_token_ids("stop_token_ids", body.stop_token_ids or [], card)


def _check_logit_bias(body: GenerationBody, card: ModelCard) -> None:
    for key, bias in (body.logit_bias or {}).items():
        # isdecimal alone would let other scripts' digits pass; a leading zero would make two keys one token.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise bad_value("logit_bias", "the keys of logit_bias must be token ids in decimal digits")
        check_token_ids("logit_bias", [int(key)], card)
        _check_range("logit_bias", bias, -100, 100)


def _check_message(message: ChatMessage, param: str) -> None:
    if message.role not in ROLES:
        raise bad_value(f"{param}.role", f"{param}.role must be one of {', '.join(ROLES)}")
    refuse_unserved(message, NEUTRAL_MESSAGE, f"{param}.")
    if message.tool_calls:
        _check_tool_calls(message, param)
    elif message.content is None:
        raise bad_value(f"{param}.content", f"{param}.content must be a string or a list of text parts")
    if message.tool_call_id is not None and message.role != "tool":
        raise bad_value(f"{param}.tool_call_id", f"{param}.tool_call_id belongs to the role tool")
    if message.content is None or isinstance(message.content, str):
        return
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise unsupported(f"{param}.content[{index}].type", "must be text: this server reads text only")
        if part.text is None:
            where = f"{param}.content[{index}].text"
            raise ApiError(400, f"Missing required field: {where}", param=where)
        refuse_unserved(part, NEUTRAL_PART, f"{param}.content[{index}].")


def _check_tool_calls(message: ChatMessage, param: str) -> None:
    if message.role != "assistant":
        raise bad_value(f"{param}.tool_calls", f"{param}.tool_calls belongs to the role assistant")
    for index, call in enumerate(message.tool_calls or ()):
        where = f"{param}.tool_calls[{index}]"
        if call.type != "function":
            raise unsupported(f"{where}.type", "must be function")
        try:
            is_object = isinstance(msgspec.json.decode(call.function.arguments), dict)
        except (msgspec.DecodeError, RecursionError):
            is_object = False
        if not is_object:
            where += ".function.arguments"
            raise bad_value(where, f"{where} must be a JSON object in a string")


def _check_continuation(body: ChatBody) -> None:
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise bad_value(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true",
        )
    if body.messages[-1].role != "assistant" or body.messages[-1].content is None:
        raise bad_value("continue_final_message", "the message to continue must be the assistant's")


def _check_range(param: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails; JSON cannot hold one, a future decoder might.
    if not low <= value <= high:
        raise bad_value(param, f"{param} must be in [{low}, {high}]")


def _brief(number: int) -> str:
    """Write a client's number in bounded space."""
    return str(number) if abs(number) < 10**20 else "of more than 20 digits"
