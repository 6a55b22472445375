"""One output of a request on its way to the client: visible text, logprobs, finish reason, token count."""

from dataclasses import dataclass, field

from replicas.api import FinishReason, TokenDelta, TokenLogprobs
from router.detokenizer import Detokenizer, TokenPieces
from router.echo import EchoedPrompt
from router.stop_strings import StopMatch, StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of an answer and its logprobs, placed in the output's text."""

    token_id: int
    offset: int
    """Characters of the output before this token's first byte; within a split character, before that."""
    logprobs: TokenLogprobs | None
    """None for the first token of an echoed prompt."""


@dataclass(frozen=True, slots=True)
class Emission:
    """What a delta made fit to send. All fields empty: nothing yet."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What a request says about the text of its outputs."""

    stops: tuple[str, ...] = ()
    special_stop_ids: frozenset[int] = frozenset()
    """Stop tokens that were asked for as stop strings."""
    min_tokens: int = 0
    includes_stop: bool = False
    """What ended the output is part of its text."""
    skip_special_tokens: bool = True
    shown_special_id: int | None = None
    """A special token whose text is shown all the same: the one that opens tool calls."""
    echo: EchoedPrompt | None = None
    reports_prompt: bool = False
    """The echoed tokens come with their logprobs, and so does a stop token: evaluation tools leave out the
    last entry, because they take it for that of the one token they had to generate."""
    echo_only: bool = False
    """Nothing that is generated is shown or counted."""


_PLAIN = OutputOptions()


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
    With `includes_stop` both are shown.
    """

    __slots__ = (
        "_base",
        "_detokenizer",
        "_echo",
        "_entries",
        "_held",
        "_matcher",
        "_num_chars",
        "_options",
        "_pieces",
        "_prompt_attempt",
        "_prompt_logprobs",
        "_released",
        "finish_reason",
        "logprob_sum",
        "num_tokens",
    )

    def __init__(self, pieces: TokenPieces, options: OutputOptions = _PLAIN) -> None:
        echo = options.echo
        self._pieces = pieces
        self._options = options
        self._detokenizer = Detokenizer(
            pieces.table(
                skip_special_tokens=options.skip_special_tokens, shown_special_id=options.shown_special_id
            ),
            b"" if echo is None else echo.pending,
        )
        self._matcher = StopMatcher(options.stops) if options.stops else None
        self._echo = echo  # until it is released
        self._base = 0 if echo is None else len(echo.text)
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_attempt = 0
        self._held = ""
        self._num_chars = 0  # held ones included
        self._entries: list[TokenEntry] = []
        self._released = _Released()
        self.num_tokens = 0
        """Generated tokens, as usage counts them."""
        self.logprob_sum = 0.0
        """Over these tokens, as far as logprobs came with them."""
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
        if self._echo is not None:
            self._take_prompt(delta)
            if not delta.token_ids and delta.finish_reason is None:
                return Emission()  # more of the prompt's logprobs are to come
        if self._options.echo_only:
            self.finish_reason = delta.finish_reason and FinishReason.LENGTH
            self._held += self._detokenizer.flush()
            return self._release(len(self._held), None)
        match = self._take_tokens(delta)
        if match is None and delta.finish_reason is not None:
            match = self._take_text(self._detokenizer.flush())
        if match is not None:
            self.finish_reason = FinishReason.STOP
            end = match.end if self._options.includes_stop else match.start
            return self._release(len(self._held) - (self._num_chars - end), end)
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            return self._release(len(self._held), None)
        held = 0 if self._matcher is None else self._matcher.held
        return self._release(len(self._held) - held, self._num_chars - held)

    def _take_prompt(self, delta: TokenDelta) -> None:
        """Collect the prompt's logprobs; those of an attempt that failed half-way come again."""
        if delta.attempt != self._prompt_attempt:
            self._prompt_attempt = delta.attempt
            self._prompt_logprobs.clear()
        self._prompt_logprobs += delta.prompt_logprobs or ()

    def _take_tokens(self, delta: TokenDelta) -> StopMatch | None:
        token_ids = delta.token_ids
        logprobs = delta.logprobs
        num_shown = len(token_ids) - (delta.stop_token_id is not None)
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if logprobs is not None:
                self.logprob_sum += logprobs[i].logprob
            if i >= num_shown and not self._options.includes_stop:
                if logprobs is not None and self._options.reports_prompt:
                    self._entries.append(TokenEntry(token_id, self._base + self._num_chars, logprobs[i]))
                break
            if logprobs is not None:
                self._entries.append(TokenEntry(token_id, self._base + self._num_chars, logprobs[i]))
            if i >= num_shown:
                # What ends an output cannot be followed by a stop string.
                self._held += (text := self._stop_text(token_id))
                self._num_chars += len(text)
                break
            match = self._take_text(self._detokenizer.feed((token_id,)))
            if match is not None:
                return match
        return None

    def _stop_text(self, token_id: int) -> str:
        if token_id in self._options.special_stop_ids:
            return self._detokenizer.feed_bytes(self._pieces.raw(token_id))
        return self._detokenizer.feed((token_id,))

    def _take_text(self, text: str) -> StopMatch | None:
        self._held += text
        self._num_chars += len(text)
        if self._matcher is None:
            return None
        # The text of the first min_tokens tokens cannot complete a stop string.
        return self._matcher.feed(text, enforce=self.num_tokens > self._options.min_tokens)

    def _release(self, num_chars: int, entries_before: int | None) -> Emission:
        """Emit `num_chars` held characters, and the tokens that begin before a place in the text.

        A token without text of its own (a special token, part of a character) waits for the text after
        it, so that text and logprobs that belong together travel together. None = all tokens.
        """
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        num_entries = len(self._entries)
        if entries_before is not None:
            limit = self._base + entries_before
            num_entries = sum(entry.offset < limit for entry in self._entries)
        entries = tuple(self._entries[:num_entries])
        del self._entries[:num_entries]
        if self._echo is not None:
            text, entries = self._echo.text + text, self._prompt_entries(self._echo) + entries
            self._echo = None
        if text:
            self._released.text.append(text)
        self._released.entries.extend(entries)
        return Emission(text, entries, self.finish_reason)

    def _prompt_entries(self, echo: EchoedPrompt) -> tuple[TokenEntry, ...]:
        if not self._options.reports_prompt:
            return ()
        logprobs = (None, *self._prompt_logprobs)
        return tuple(map(TokenEntry, echo.token_ids, echo.offsets, logprobs))
