"""Text -> token ids: the tokenizer and chat template of a model's folder.

The `tokenizers` library is used directly: it is what transformers' tokenizers are made of, and a router
then needs neither transformers nor torch (3 s and 300 MB).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from router.chat_template import ChatTemplate
from router.detokenizer import TokenizerError, TokenPieces
from router.protocol import CalledTool, ChatBody, ChatMessage
from router.tool_formats import HERMES, ToolFormat, describe, format_of_template

_SPECIAL_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")


class TooManyTokensError(Exception):
    """A text that cannot fit, found out before tokenising it."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """Everything a router knows about a model's text. Thread-safe; encoding releases the GIL."""

    folder: Path
    tokenizer: Tokenizer
    pieces: TokenPieces
    template: ChatTemplate | None
    """None: the model was not made for chat."""
    bos_token: str | None
    tool_format: ToolFormat
    """How the model writes tool calls."""

    @classmethod
    def from_folder(cls, folder: Path) -> "TextCodec":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises TokenizerError that names the file, ChatTemplateError for a template that does not compile.
        """
        path = folder / "tokenizer.json"
        document = _read_json(path)
        config_path = folder / "tokenizer_config.json"
        config = _read_json(config_path) if config_path.exists() else {}
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        specials = _special_tokens(config)
        _follow_bos_setting(tokenizer, config, specials)
        source = _template_source(folder, config)
        return cls(
            folder=folder,
            tokenizer=tokenizer,
            pieces=TokenPieces(tokenizer.get_vocab(with_added_tokens=False), document),
            template=None if source is None else ChatTemplate(source, specials),
            bos_token=specials.get("bos_token"),
            tool_format=format_of_template(source or ""),
        )

    def encode_prompts(
        self, texts: Sequence[str], max_model_len: int, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Tokenise completion prompts, by default with the special tokens that the tokenizer adds.

        A text that begins with the BOS token keeps that one and gets no second.
        Raises TooManyTokensError.
        """
        encoded = self._encode(texts, max_model_len, add_special_tokens=add_special_tokens)
        bos = self.bos_token
        if bos is None or not add_special_tokens:
            return encoded
        bos_id = self.tokenizer.token_to_id(bos)
        for text, ids in zip(texts, encoded, strict=True):
            if text.startswith(bos) and ids[:2] == [bos_id, bos_id]:
                del ids[0]
        return encoded

    def encode_chat(self, body: ChatBody, max_model_len: int, *, with_tools: bool = False) -> list[int]:
        """Render and tokenise a conversation; the template writes its own BOS unless the body says else.

        `with_tools`: the model is told of the body's tools.

        Raises ChatTemplateError, TooManyTokensError. The codec must have a template.
        """
        assert self.template is not None
        messages = [_template_message(message, self.template) for message in body.messages]
        tools = [msgspec.to_builtins(tool) for tool in body.tools or ()] if with_tools else None
        for tool in tools or ():
            # As the client wrote it: templates print a tool whole, and models know no null.
            tool["function"] = {key: value for key, value in tool["function"].items() if value is not None}
        if tools and not self.template.knows_tools:
            messages = _with_system(messages, describe(tools))
        text = self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            variables=body.chat_template_kwargs or {},
        )
        (ids,) = self.encode_prompts([text], max_model_len, add_special_tokens=bool(body.add_special_tokens))
        return ids

    def _encode(
        self, texts: Sequence[str], max_model_len: int, *, add_special_tokens: bool
    ) -> list[list[int]]:
        longest = max(map(len, texts), default=0)
        if longest > max_model_len * self.pieces.max_piece_bytes:
            raise TooManyTokensError(-(-longest // self.pieces.max_piece_bytes))
        # The batch call, even for one text: `encode` holds the GIL and also computes offsets.
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


def _template_message(message: ChatMessage, template: ChatTemplate) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text or "" for part in content or ())
    role = message.role
    if role == "developer" and not template.knows_developer:
        role = "system"
    if not template.knows_tools:
        return _plain_message(message, role, content)
    rendered: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def _template_call(call: CalledTool) -> dict[str, Any]:
    arguments = msgspec.json.decode(call.function.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _plain_message(message: ChatMessage, role: str, content: str) -> dict[str, Any]:
    """Write calls and their results as text, for templates that know neither."""
    for call in message.tool_calls or ():
        body = HERMES.call(call.function.name, call.function.arguments)
        content += f"{chr(10) if content else ''}{HERMES.opening}\n{body}\n{HERMES.closing}"
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    rendered = {"role": role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Append `text` to the leading system message, or make it one."""
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens; older files hold them as objects with `content`."""
    found = {name: config.get(name) for name in _SPECIAL_TOKEN_NAMES}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _follow_bos_setting(tokenizer: Tokenizer, config: dict[str, Any], specials: dict[str, str]) -> None:
    """Let add_bos_token and add_eos_token, where a model sets them, override tokenizer.json.

    As transformers does (TokenizersBackend.update_post_processor).
    """
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before = specials.get("bos_token") if config.get("add_bos_token") else None
    after = specials.get("eos_token") if config.get("add_eos_token") else None
    template = [*([before] if before else []), "$A", *([after] if after else [])]
    used = {token: tokenizer.token_to_id(token) for token in (before, after) if token}
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=list(used.items()))


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: chat_template is not a string")
    return template
