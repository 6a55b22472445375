"""Grammars: which tokens may come next. The one place where a replica knows what tokens spell.

A grammar is a string in llguidance's own form (its JSON form, or Lark); routers translate schemas, regular
expressions and tools into it. llguidance, because it was measured best on this job (SmolLM2's 49k tokens,
one CPU core, against xgrammar 0.2.9): a nested schema compiles in 1 ms against 8, a regular expression in 1
against 33; a mask takes 5 to 80 us against 3 to 20, at worst 1.2 ms against 2.8; its limits bound time and
memory whatever the grammar says; and it needs no torch, so that a router can check a grammar as well.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from replicas.api import GRAMMAR_LIMITS
from replicas.errors import ConstraintError
from replicas.sequence import Sequence

MAX_CACHED_GRAMMARS: Final = 64
"""With the limit on the states of each it holds at most some 1.3 GB, however its grammars are made."""
_LIMITS: Final = LLParserLimits(**GRAMMAR_LIMITS)


@dataclass(slots=True)
class _Followed:
    """A grammar at a place in a sequence."""

    matcher: LLMatcher
    num_output_tokens: int = 0
    """Generated tokens that the matcher has taken."""


class Constraints:
    """Masks for the sequences whose requests carry a grammar.

    What a matcher knows is derived from the generated tokens alone, and forgotten with its sequence: so
    nothing is lost by preemption, by a resume on another replica, or when a step is executed twice.
    """

    def __init__(self, open_vocabulary: Callable[[], LLTokenizer], vocab_size: int) -> None:
        """`open_vocabulary` is called once, in another thread; what it raises, every grammar raises."""
        self._vocab_size = vocab_size
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="headway-grammar")
        self._vocabulary = self._compiler.submit(open_vocabulary)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()
        self._mask = allocate_token_bitmask(1, vocab_size)

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "Constraints":
        """Take the vocabulary from a model's tokenizer.json."""

        def read() -> LLTokenizer:
            document = (folder / "tokenizer.json").read_text(encoding="utf-8")
            return LLTokenizer(document, n_vocab=vocab_size, eos_token=list(eos_token_ids))

        return cls(read, vocab_size)

    def prepare(self, grammar: str) -> None:
        """Begin to compile a grammar in another thread, unless it is in the cache. Returns at once."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return
        self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
        if len(self._compiled) > MAX_CACHED_GRAMMARS:
            self._compiled.popitem(last=False)

    def allowed(self, sequence: Sequence) -> NDArray[np.bool_]:  # [vocab_size]
        """Say which tokens may come after the sequence's last one. Some 100 us for a new token.

        The end tokens are allowed where the output is complete. Raises ConstraintError.
        """
        followed = self._followed.get(sequence)
        if followed is None:
            followed = self._followed[sequence] = _Followed(self._matcher(sequence.sampling.grammar))
        matcher = followed.matcher
        new = sequence.token_ids[sequence.num_prompt_tokens + followed.num_output_tokens :]
        if new:
            matcher.consume_tokens(new)
            followed.num_output_tokens += len(new)
        return self._mask_at(matcher)

    def allowed_after(self, sequence: Sequence, drafts: Rows[int]) -> list[NDArray[np.bool_]]:
        """As `allowed`, then the same after the first draft, the first two, ... as far as they are allowed.

        Leaves the grammar where it was. Raises ConstraintError if it cannot be followed to the last token.
        """
        masks = [self.allowed(sequence)]
        matcher = self._followed[sequence].matcher
        num_taken = 0
        try:
            for token in drafts:
                if not masks[-1][token] or not matcher.try_consume_tokens([token]):
                    break
                num_taken += 1
                masks.append(self._mask_at(matcher))
        except ConstraintError:  # only if this guess is right, and then it shows again
            pass
        if num_taken and not matcher.rollback(num_taken):
            del self._followed[sequence]  # to be followed anew, from its first token
        return masks

    def _mask_at(self, matcher: LLMatcher) -> NDArray[np.bool_]:
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, self._mask)
        if matcher.is_error():
            raise ConstraintError(f"the grammar cannot be followed: {_first_line(matcher.get_error())}")
        bits = np.unpackbits(self._mask[0].view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _matcher(self, grammar: str) -> LLMatcher:
        self.prepare(grammar)
        return self._compiled[grammar].result().deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            vocabulary = self._vocabulary.result()
        except (OSError, ValueError) as error:
            raise ConstraintError(f"this model cannot follow a grammar: {_first_line(str(error))}") from None
        return LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
