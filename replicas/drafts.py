"""Drafter: guesses a sequence's next tokens from its own past (prompt lookup decoding).

Where the last few tokens have come before, what followed them then is guessed to follow again: quotations,
code, tables. No second model. Source: Saxena, "Prompt lookup decoding" (2023). Verification is that of
Leviathan et al., "Fast inference from transformers via speculative decoding" (ICML'23), simplified: draws
depend on (seed, position) only, so a guess is right exactly if the draw says the same.
"""

from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from replicas.kv_cache import KVCacheManager
from replicas.prefill_budget import PrefillBudget
from replicas.sequence import Sequence
from replicas.step import Step

NGRAM: Final = 3
"""So many tokens must repeat before anything is guessed: repetitions of two are often chance."""
PAUSE: Final = 8
"""Tokens without a guess after one that was wrong from its start."""


@dataclass(slots=True)
class _Past:
    """What a sequence has said so far, by its n-grams."""

    next_positions: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> the position after its last occurrence, that at the end left out."""
    num_indexed: int = NGRAM
    """Positions below have their n-gram in the table."""
    length: int = 0
    """Tokens to guess at most; doubles while all are right."""
    resume_at: int = 0
    """No guesses for fewer tokens than these."""


class Drafter:
    """O(1) per new token; forgets a sequence when nobody else holds it."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pasts: WeakKeyDictionary[Sequence, _Past] = WeakKeyDictionary()

    def add_drafts(self, step: Step, budget: PrefillBudget, cache: KVCacheManager) -> None:
        """Let the step's decodes guess, with the tokens, the time and the blocks that nobody else wanted."""
        for position, entry in enumerate(step.sequences[: step.num_decodes]):
            sequence = entry.sequence
            longest = sequence.max_num_tokens - sequence.num_tokens - 1
            drafts = self.draft(sequence, min(longest, budget.left))
            drafts = drafts[: budget.take(len(drafts), entry.start)]
            if drafts and cache.extend_for(sequence, sequence.num_tokens + len(drafts)):
                step.add_drafts(position, drafts)

    def draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Guess what follows the sequence's tokens: at most `limit`, maybe nothing."""
        past = self._pasts.get(sequence)
        if past is None:
            past = self._pasts[sequence] = _Past(length=self._max_tokens)
        token_ids = sequence.token_ids
        for position in range(past.num_indexed, len(token_ids)):
            past.next_positions[tuple(token_ids[position - NGRAM : position])] = position
        past.num_indexed = max(past.num_indexed, len(token_ids))
        if len(token_ids) < max(NGRAM, past.resume_at):
            return ()
        start = past.next_positions.get(tuple(token_ids[-NGRAM:]))
        if start is None:
            return ()
        return tuple(token_ids[start : start + min(limit, past.length)])

    def learn(self, sequence: Sequence, num_drafted: int, num_right: int) -> None:
        """Take note of how a guess ended."""
        past = self._pasts[sequence]
        if num_right == num_drafted:
            past.length = min(self._max_tokens, 2 * past.length)
        else:
            past.length = max(1, num_right)
        if not num_right:
            past.resume_at = sequence.num_tokens + PAUSE
