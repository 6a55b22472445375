"""Fast forward: many decode steps at once, in closed form.

While a batch only decodes, each step differs from the one before in one thing: every sequence has read one
more token. With step times linear in the tokens read, step j takes first + j * growth seconds, so the time
of k steps, and the steps within a time, have closed forms.
"""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from cluster.simulation.profile import StepTimes
from cluster.simulation.timed_runner import TOKEN_ID
from replicas.api import TokenDelta
from replicas.kv_cache import KVCacheManager
from replicas.scheduler import Outputs
from replicas.sequence import Sequence, SequenceStatus
from replicas.step_time import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Decode steps of an unchanging batch. Its last step ends before any sequence does."""

    sequences: Items[Sequence]
    first_s: float
    """Duration of the first step."""
    growth_s: float
    """How much longer each step is than the one before."""
    max_steps: int

    @classmethod
    def of(cls, sequences: Items[Sequence], steps: StepTimes, max_steps: int) -> "Stretch":
        """Describe the next steps of a batch that only decodes."""
        count = len(sequences)
        kv_read = sum(sequence.num_computed_tokens for sequence in sequences)
        shape = StepShape(num_new_tokens=count, kv_read_tokens=kv_read, num_sampling=count)
        return cls(
            sequences=sequences,
            first_s=steps.seconds(shape),
            growth_s=steps.read_token_s * count,
            max_steps=max_steps,
        )

    def shortened(self, max_steps: int) -> "Stretch":
        return replace(self, max_steps=min(self.max_steps, max_steps))

    def elapsed_s(self, num_steps: int) -> float:
        """Return the time that so many steps take."""
        return num_steps * self.first_s + self.growth_s * num_steps * (num_steps - 1) / 2

    def steps_within(self, seconds: float) -> int:
        """Return how many steps end within this time, at most max_steps."""
        half = self.growth_s / 2
        linear = self.first_s - half
        if half * seconds < 1e-9 * linear * linear:
            steps = seconds / linear
        else:
            steps = (math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half)
        return min(self.max_steps, math.floor(steps + 1e-9))


def max_decode_steps(sequences: Items[Sequence], cache: KVCacheManager) -> int:
    """Return how many steps the batch decodes until a sequence ends, or blocks might run out."""
    limit = min(sequence.max_num_tokens - len(sequence.token_ids) for sequence in sequences) - 1
    # A sequence that grows by k tokens takes at most k / block_size + 1 more blocks.
    spare = cache.num_free_blocks - len(sequences)
    return max(0, min(limit, spare * cache.block_size // len(sequences)))


def is_decoding(sequences: Items[Sequence]) -> bool:
    """Whether every sequence runs and has just one token to compute."""
    return all(
        sequence.status is SequenceStatus.RUNNING
        and len(sequence.token_ids) - sequence.num_computed_tokens == 1
        for sequence in sequences
    )


def advance(sequences: Items[Sequence], num_steps: int, cache: KVCacheManager) -> Outputs:
    """Do to the sequences what so many decode steps would have done; returns their deltas by owner."""
    outputs: Outputs = {}
    for sequence in sequences:
        tokens = [TOKEN_ID] * num_steps
        sequence.token_ids += tokens
        sequence.num_computed_tokens += num_steps
        cache.extend(sequence)
        if sequence.num_computed_tokens // cache.block_size > sequence.num_registered_blocks:
            cache.register_computed(sequence)
        request = sequence.request
        delta = TokenDelta(request.request_id, request.attempt, sequence.index, tokens)
        outputs.setdefault(sequence.owner, []).append(delta)
    return outputs
