"""What follows a step whose tokens are not known yet, where that can be said."""

from collections.abc import Sequence as Rows

from replicas.sequence import Sequence, SequenceStatus
from replicas.step import ScheduledSequence, Step


def decodes_after(step: Step, running: Rows[Sequence]) -> list[ScheduledSequence] | None:
    """Return the decodes of the step after `step`; None when others belong to it, or nothing can be said.

    Sequences that reach their longest length in `step` are left out. Those that sample their last token
    there may be in: it is one row wasted.
    """
    live = [entry for entry in step.sequences if entry.sequence.status is SequenceStatus.RUNNING]
    if len(live) != len(running) or not all(entry.samples for entry in live):
        return None  # some prefill goes on
    following = []
    for entry in live:
        sequence = entry.sequence
        start = entry.start + entry.num_new_tokens
        if start + 1 >= sequence.max_num_tokens:
            continue
        if _depends_on_tokens(sequence):
            return None
        following.append(ScheduledSequence(sequence, start, 1, True))
    return following or None


def _depends_on_tokens(sequence: Sequence) -> bool:
    """Whether the choice of a token looks at the tokens before it, or at whether an end is allowed yet."""
    params = sequence.sampling
    return bool(
        params.grammar
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or sequence.num_output_tokens < params.min_tokens
    )
