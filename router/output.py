"""One output of a request on its way to the client: visible text, logprobs, finish reason, token count."""

from dataclasses import dataclass, field

from replicas.api import FinishReason, TokenDelta, TokenLogprobs
from router.detokenizer import Detokenizer, TokenPieces
from router.stop_strings import StopMatch, StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A generated token and its logprobs, placed in the output's text."""

    token_id: int
    offset: int
    """Characters of the output before this token's first byte; within a split character, before that."""
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Emission:
    """What a delta made fit to send. All fields empty: nothing yet."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Released:
    """All that was emitted, for an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)


class OutputText:
    """Turns the deltas of one output into emissions.

    Token by token, so that neither text, usage nor logprobs depend on how tokens were grouped into
    deltas. Text that may be the beginning of a stop string is held back. A stop token that ended the
    output is counted and not shown; a stop string is not shown, and tokens after it are not counted.
    """

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_held",
        "_matcher",
        "_min_tokens",
        "_num_chars",
        "_released",
        "finish_reason",
        "num_tokens",
    )

    def __init__(self, pieces: TokenPieces, *, stops: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(pieces)
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._held = ""
        self._num_chars = 0  # held ones included
        self._entries: list[TokenEntry] = []
        self._released = _Released()
        self.num_tokens = 0
        """Generated tokens, as usage counts them."""
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._released.text)

    @property
    def entries(self) -> list[TokenEntry]:
        """All token entries emitted so far."""
        return self._released.entries

    def feed(self, delta: TokenDelta) -> Emission:
        """Take a delta that is no failure. Must not be called after the output has finished."""
        match = self._take_tokens(delta)
        if match is None and delta.finish_reason is not None:
            match = self._take_text(self._detokenizer.flush())
        if match is not None:
            self.finish_reason = FinishReason.STOP
            return self._release(len(self._held) - (self._num_chars - match.start), match.start)
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            return self._release(len(self._held), None)
        held = 0 if self._matcher is None else self._matcher.held
        return self._release(len(self._held) - held, self._num_chars - held)

    def _take_tokens(self, delta: TokenDelta) -> StopMatch | None:
        token_ids = delta.token_ids
        num_shown = len(token_ids) - (delta.stop_token_id is not None)
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if i >= num_shown:
                break
            if delta.logprobs is not None:
                self._entries.append(TokenEntry(token_id, self._num_chars, delta.logprobs[i]))
            match = self._take_text(self._detokenizer.feed((token_id,)))
            if match is not None:
                return match
        return None

    def _take_text(self, text: str) -> StopMatch | None:
        self._held += text
        self._num_chars += len(text)
        if self._matcher is None:
            return None
        # The text of the first min_tokens tokens cannot complete a stop string.
        return self._matcher.feed(text, enforce=self.num_tokens > self._min_tokens)

    def _release(self, num_chars: int, entries_before: int | None) -> Emission:
        """Emit `num_chars` held characters, and the tokens that begin before a place in the text.

        A token without text of its own (a special token, part of a character) waits for the text after
        it, so that text and logprobs that belong together travel together. None = all tokens.
        """
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        num_entries = len(self._entries)
        if entries_before is not None:
            num_entries = sum(entry.offset < entries_before for entry in self._entries)
        entries = tuple(self._entries[:num_entries])
        del self._entries[:num_entries]
        if text:
            self._released.text.append(text)
        self._released.entries.extend(entries)
        return Emission(text, entries, self.finish_reason)
