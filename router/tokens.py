"""POST /tokenize and /detokenize: what a prompt costs, and what ids spell. As vLLM has them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from replicas.api import ModelCard
from router.chat_template import ChatTemplateError
from router.detokenizer import Detokenizer
from router.errors import ApiError, bad_value, context_exceeded
from router.json_body import decode_body
from router.protocol import ChatBody, ChatMessage, ToolDefinition
from router.text import TextCodec, TooManyTokensError
from router.tools import tool_use
from router.validation import check_chat, check_model, check_token_ids


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either `prompt`, as for completions, or `messages`, as for chats."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=1 << 16)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=1 << 20)]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_FOR_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def tokenize(data: bytes, text: TextCodec, card: ModelCard) -> bytes:
    """Return the answer to a body. Raises ApiError."""
    body = decode_body(data, _TOKENIZE)
    check_model(body.model, card)
    if (body.prompt is None) == (body.messages is None):
        raise bad_value("prompt", "give either prompt or messages")
    param = "messages" if body.prompt is None else "prompt"
    try:
        if body.prompt is not None:
            for field in _FOR_CHATS:
                if getattr(body, field) is not None:
                    raise bad_value(field, f"{field} belongs to messages")
            adds = body.add_special_tokens is not False
            (ids,) = text.encode_prompts([body.prompt], card.max_model_len, add_special_tokens=adds)
        else:
            ids = _chat_ids(body, text, card)
    except TooManyTokensError as error:
        raise context_exceeded(
            param,
            limit=card.max_model_len,
            num_prompt_tokens=error.at_least,
            num_requested=None,
            at_least=True,
        ) from None
    return msgspec.json.encode(Tokenized(count=len(ids), max_model_len=card.max_model_len, tokens=ids))


def detokenize(data: bytes, text: TextCodec, card: ModelCard) -> bytes:
    """Return the answer to a body; special tokens are shown. Raises ApiError."""
    body = decode_body(data, _DETOKENIZE)
    check_model(body.model, card)
    check_token_ids("tokens", body.tokens, card)
    detokenizer = Detokenizer(text.pieces.table(skip_special_tokens=False))
    prompt = detokenizer.feed(body.tokens) + detokenizer.flush()
    return msgspec.json.encode(Detokenized(prompt=prompt))


def _chat_ids(body: TokenizeBody, text: TextCodec, card: ModelCard) -> list[int]:
    chat = ChatBody(
        messages=body.messages or [],
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    check_chat(chat, card)
    if text.template is None:
        raise ApiError(400, "this model has no chat template", param="messages", code="unsupported_parameter")
    try:
        tools = tool_use(chat, text.tool_format)
        return text.encode_chat(chat, card.max_model_len, with_tools=tools is not None)
    except ChatTemplateError as error:
        raise bad_value("messages", str(error)) from None
