"""Outputs -> OpenAI answers: the two formats, chat and text completion, streamed and whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from replicas.api import FinishReason, TokenLogprobs
from router import sse
from router.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    Delta,
    TextChoice,
    TextCompletion,
    TopChatLogprob,
    Usage,
)
from router.detokenizer import TokenPieces
from router.output import Emission, OutputText, TokenEntry
from router.tool_answers import delta_of, whole_message
from router.tool_calls import ToolCallParser
from router.tools import ToolUse

_LEAST_LOGPROB: Final = -9999.0
"""OpenAI's word for a probability of zero; JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer repeat."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    fingerprint: str
    wants_logprobs: bool
    tools: ToolUse | None = None
    """What the answer may call."""
    wants_usage: bool
    """In a stream: `usage: null` on every chunk, and a last one with the totals."""


class AnswerFormat(Protocol):
    """Writes answers of one endpoint."""

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return what precedes the first event of a choice; may be empty."""
        ...

    def event(self, index: int, emission: Emission, usage: Usage | None = None) -> bytes:
        """Return the event for an emission that is not empty; `usage` is the usage so far, if asked for."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the chunk without choices that carries the totals."""
        ...

    def whole(self, outputs: Sequence[OutputText], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed. All outputs have finished."""
        ...


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, head: AnswerHead, pieces: TokenPieces) -> None:
        self._head = head
        self._pieces = pieces
        self._no_usage: UnsetType | None = None if head.wants_usage else UNSET
        self._parsers: dict[int, ToolCallParser] = {}  # by choice, for streams

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        return self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))], usage)

    def event(self, index: int, emission: Emission, usage: Usage | None = None) -> bytes:
        logprobs = self._logprobs(emission.entries) if emission.entries else None
        if self._head.tools is None:
            deltas = [Delta(content=emission.text or None)]
            finish_reason: str | None = emission.finish_reason
        else:
            deltas, finish_reason = self._tool_deltas(self._head.tools, index, emission)
            if not deltas and (logprobs or finish_reason):
                deltas = [Delta()]
        events = []
        for number, delta in enumerate(deltas, 1):
            choice = ChatChunkChoice(
                index=index,
                delta=delta,
                logprobs=logprobs if number == 1 else None,
                finish_reason=finish_reason if number == len(deltas) else None,
            )
            events.append(self._chunk([choice], usage))
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, outputs: Sequence[OutputText], usage: Usage) -> bytes:
        choices = []
        for index, output in enumerate(outputs):
            assert output.finish_reason is not None
            message, finish_reason = AssistantMessage(output.text), str(output.finish_reason)
            if self._head.tools is not None:
                message = whole_message(self._head.tools, output.text)
                finish_reason = _reason(self._head.tools, output.finish_reason, bool(message.tool_calls))
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(output.entries) if self._head.wants_logprobs else None,
                    finish_reason=finish_reason,
                )
            )
        head = self._head
        return msgspec.json.encode(
            ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage,
                system_fingerprint=head.fingerprint,
            )
        )

    def _tool_deltas(self, tools: ToolUse, index: int, emission: Emission) -> tuple[list[Delta], str | None]:
        """Return what is certain of text and calls by now, and the finish reason."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = tools.parser()
        parts = parser.feed(emission.text)
        if emission.finish_reason is None:
            return [delta_of(part) for part in parts], None
        parts += parser.flush()
        return [delta_of(part) for part in parts], _reason(
            tools, emission.finish_reason, parser.num_calls > 0
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        head = self._head
        return sse.event(
            ChatChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.fingerprint,
                choices=choices,
                usage=self._no_usage if usage is None else usage,
            )
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        return ChatLogprobs([self._logprob(entry) for entry in entries])

    def _logprob(self, entry: TokenEntry) -> ChatLogprob:
        raw = self._pieces.raw(entry.token_id)
        assert entry.logprobs is not None, "a chat has no echo"
        return ChatLogprob(
            _token_text(raw),
            _finite(entry.logprobs.logprob),
            list(raw),
            [self._alternative(top.token_id, top.logprob) for top in entry.logprobs.top],
        )

    def _alternative(self, token_id: int, logprob: float) -> TopChatLogprob:
        raw = self._pieces.raw(token_id)
        return TopChatLogprob(_token_text(raw), _finite(logprob), list(raw))


def _reason(tools: ToolUse, reason: FinishReason, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP and not tools.named else str(reason)


class CompletionFormat:
    """text_completion."""

    def __init__(self, head: AnswerHead, pieces: TokenPieces) -> None:
        self._head = head
        self._pieces = pieces
        self._no_usage: UnsetType | None = None if head.wants_usage else UNSET

    def opening(self, index: int, usage: Usage | None = None) -> bytes:  # noqa: ARG002 - text has no role to announce
        return b""

    def event(self, index: int, emission: Emission, usage: Usage | None = None) -> bytes:
        choice = TextChoice(
            index=index,
            text=emission.text,
            logprobs=self._logprobs(emission.entries) if emission.entries else None,
            finish_reason=emission.finish_reason,
        )
        return sse.event(self._answer([choice], self._no_usage if usage is None else usage))

    def usage_event(self, usage: Usage) -> bytes:
        return sse.event(self._answer([], usage))

    def whole(self, outputs: Sequence[OutputText], usage: Usage) -> bytes:
        choices = [
            TextChoice(
                index=index,
                text=output.text,
                logprobs=self._logprobs(output.entries) if self._head.wants_logprobs else None,
                finish_reason=output.finish_reason,
            )
            for index, output in enumerate(outputs)
        ]
        return msgspec.json.encode(self._answer(choices, usage))

    def _answer(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> TextCompletion:
        head = self._head
        return TextCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> CompletionLogprobs:
        return CompletionLogprobs(
            [self._text(entry.token_id) for entry in entries],
            [None if entry.logprobs is None else _finite(entry.logprobs.logprob) for entry in entries],
            [
                None if entry.logprobs is None else self._top(entry.token_id, entry.logprobs)
                for entry in entries
            ],
            [entry.offset for entry in entries],
        )

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the token itself, which is always among them, as OpenAI documents."""
        top = {self._text(top.token_id): _finite(top.logprob) for top in logprobs.top}
        return top | {self._text(token_id): _finite(logprobs.logprob)}

    def _text(self, token_id: int) -> str:
        text = _token_text(self._pieces.raw(token_id))
        return f"bytes:{text}" if text.startswith("\\x") else text


def _token_text(raw: bytes) -> str:
    r"""Return a token's text; bytes that are no text by themselves are written as \xf0\x9f."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
