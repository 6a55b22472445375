"""The prompt as part of an answer (`echo`): its text, and where each of its tokens begins."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from router.detokenizer import TokenPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """What an answer repeats of its prompt."""

    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    """Characters of `text` before each token's first byte; within a split character, before that."""
    text: str
    pending: bytes
    """Of a character that the prompt ends within; the answer may complete it."""

    @classmethod
    def of(
        cls, token_ids: Sequence[int], pieces: TokenPieces, *, skip_special_tokens: bool
    ) -> "EchoedPrompt":
        """Decode a prompt as the tokenizer would. O(len(token_ids))."""
        table = pieces.table(skip_special_tokens=skip_special_tokens)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        strips_space = pieces.begins_with_space
        parts: list[str] = []
        offsets: list[int] = []
        num_chars = 0
        for token_id in token_ids:
            offsets.append(num_chars)
            raw = table[token_id] if token_id < len(table) else b""
            if raw and strips_space:
                strips_space = False
                raw = raw.removeprefix(b" ")
            part = decoder.decode(raw)
            parts.append(part)
            num_chars += len(part)
        return cls(
            token_ids=tuple(token_ids),
            offsets=tuple(offsets),
            text="".join(parts),
            pending=decoder.getstate()[0],
        )
