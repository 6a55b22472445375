"""Synthetic text: common English words that are one token each for nearly every BPE vocabulary."""

import random
from array import array
from pathlib import Path
from typing import Final

from load.completion import Message
from load.plan import Script, Segment, Turn

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text("ascii").split())
POOL_WORDS: Final = 1 << 17
LEAD_WORDS: Final = 6
"""Drawn word by word: 6 of hundreds, so that two prompts never begin alike by chance."""


class WordSource:
    """Turns segments into text at the cost of a copy, so that a long prompt does not delay other streams."""

    def __init__(self, words: tuple[str, ...], *, tokens_per_word: float = 1.0) -> None:
        self._words = words
        self._tokens_per_word = tokens_per_word
        drawn = random.Random(len(words)).choices(words, k=POOL_WORDS)
        self._pool = " ".join(drawn) + " "
        self._starts = array("L", [0])
        for word in drawn:
            self._starts.append(self._starts[-1] + len(word) + 1)

    def text(self, segment: Segment) -> str:
        """Return `num_tokens` tokens of words; the same text for the same segment."""
        num_words = max(1, round(segment.num_tokens / self._tokens_per_word))
        rng = random.Random(segment.seed)
        lead = rng.choices(self._words, k=min(LEAD_WORDS, num_words))
        pieces = [" ".join(lead)]
        left = num_words - len(lead)
        while left > 0:
            first = rng.randrange(POOL_WORDS)
            count = min(left, POOL_WORDS - first)
            pieces.append(self._pool[self._starts[first] : self._starts[first + count] - 1])
            left -= count
        return " ".join(pieces)

    def join(self, segments: tuple[Segment, ...]) -> str:
        """Return the text of several segments, one after the other."""
        return " ".join(self.text(segment) for segment in segments)


class PromptWriter:
    """Writes the messages of scripts, so that the server counts the tokens that were planned."""

    def __init__(self, words: WordSource, *, overhead_tokens: int = 0) -> None:
        """`overhead_tokens`: what the chat template adds to a conversation of one message."""
        self._words = words
        self._overhead_tokens = overhead_tokens

    def opening(self, script: Script) -> list[Message]:
        """Return the messages in front of the first turn."""
        return [{"role": "system", "content": self._words.join(script.system)}] if script.system else []

    def turn(self, turn: Turn, *, is_first: bool) -> list[Message]:
        """Return the messages that this turn adds to the conversation."""
        if turn.messages:
            return list(turn.messages)
        segments = turn.segments
        if is_first and self._overhead_tokens:
            *before, last = segments
            num_tokens = max(1, last.num_tokens - self._overhead_tokens)
            segments = (*before, Segment(last.seed, num_tokens))
        return [{"role": "user", "content": self._words.join(segments)}]
