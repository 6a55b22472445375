"""Step: what the scheduler asks of a runner, and what comes back."""

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec

from replicas.api import TokenLogprobs
from replicas.sequence import Sequence
from replicas.step_time import StepShape

MAX_PROMPT_ROWS: Final = 256
"""Prompt positions of one step whose logprobs are reported: each costs a row of vocabulary size, in
memory and in the head's time."""


class ScheduledSequence(msgspec.Struct, gc=False):
    """A slice of one sequence's tokens to be computed in this step.

    Positions `start .. start + num_new_tokens - 1` of `sequence.token_ids`, with `drafts` behind them, are
    computed; their K and V go to the slots that `sequence.block_table` gives them. Blocks for all of them are
    allocated.
    A Struct, not a dataclass: one is made per sequence and step, and this is three times cheaper.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    """The last new token is the last known one: sample its successor. False inside a prompt."""
    drafts: tuple[int, ...] = ()
    """Guesses of what follows `sequence.token_ids`: their successors are sampled as well, each under the
    condition that the guesses before it are right."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One forward pass. `sequences` with one new token (decodes) come first."""

    number: int
    sequences: list[ScheduledSequence]
    num_tokens: int
    """Sum of num_new_tokens."""
    num_decodes: int
    """Leading entries of `sequences` that compute exactly one known token and sample."""
    num_drafts: int = 0
    """Guessed tokens among `num_tokens`; only decodes have any."""
    shape: StepShape = field(default_factory=StepShape)
    """What the step's duration depends on."""
    prompt_rows_left: int = MAX_PROMPT_ROWS
    """How many more positions may report the logprobs of prompt tokens."""
    overloaded: bool = False
    """The prefill chunk was at its floor: the ITL budget cannot be kept."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of sequences that were preempted."""
        return self.num_tokens - self.num_decodes - self.num_drafts

    def within_prompt_rows(self, sequence: Sequence) -> int:
        """How many of its uncomputed tokens fit in without reporting too many prompt logprobs; maybe 0."""
        start, num_tokens = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
        rows = sequence.prompt_rows(start, num_tokens)
        return num_tokens if len(rows) <= self.prompt_rows_left else rows[0] + self.prompt_rows_left - start

    def add_prefill(self, sequence: Sequence, num_new_tokens: int, samples: bool) -> None:
        start = sequence.num_computed_tokens
        self.sequences.append(ScheduledSequence(sequence, start, num_new_tokens, samples))
        self.num_tokens += num_new_tokens
        self.prompt_rows_left -= len(sequence.prompt_rows(start, num_new_tokens))
        self.shape = self.shape.with_prefill(num_new_tokens, start, samples)

    def add_drafts(self, position: int, drafts: tuple[int, ...]) -> None:
        """Have a decode compute `drafts` too."""
        entry = self.sequences[position]
        entry.drafts = drafts
        entry.num_new_tokens += len(drafts)
        self.num_tokens += len(drafts)
        self.num_drafts += len(drafts)
        self.shape = replace(self.shape, num_new_tokens=self.shape.num_new_tokens + len(drafts))

    def discard(self, sequence: Sequence) -> int:
        """Take a sequence out of a step under construction. Returns the tokens it had been given."""
        for position, entry in enumerate(self.sequences):
            if entry.sequence is not sequence:
                continue
            del self.sequences[position]
            self.num_tokens -= entry.num_new_tokens
            if position < self.num_decodes:
                self.num_decodes -= 1
                self.shape = self.shape.without_decode(entry.start)
            else:
                self.shape = self.shape.with_prefill(-entry.num_new_tokens, entry.start, entry.samples)
            return entry.num_new_tokens
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a sequence sampled after its first token of a step: one token per right guess."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """Parallel to `token_ids`; None when not asked for."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a runner made of a step. Lists are parallel to `step.sequences`."""

    token_ids: list[int | None]
    """The sampled token; None where the sequence does not sample or failed."""
    logprobs: list[TokenLogprobs | None] | None = None
    """None when no sequence of the step asked for logprobs."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Position in `step.sequences` -> one entry for each of its `Sequence.prompt_rows` in this step."""
    verified: dict[int, Verified] = field(default_factory=dict)
    """Position in `step.sequences` -> the tokens after the first, where a guess was right."""
    errors: dict[int, str] = field(default_factory=dict)
    """Position in `step.sequences` -> one line: this sequence failed, the others are good."""


class Runner(Protocol):
    """Executes steps. The only thing the engine knows about models and hardware.

    `execute` may be called again with the same sequences after it raised: writing K and V is
    idempotent and a draw depends on (seed, index, position) only.
    """

    def execute(self, step: Step) -> StepResult:
        """Compute the step and sample. Blocks until the tokens are known.

        Must not mutate the sequences. A failure that belongs to one sequence goes to
        `StepResult.errors`; an exception means that nothing of the step can be trusted.
        """
        ...
