"""Drafts in a runner: a row of logits per guess, and which of the tokens sampled there count."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from replicas.sampling import Sampled
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence, Verified


def sampled_positions(entries: Rows[ScheduledSequence]) -> list[Sequence]:
    """Return a sequence per row to sample, as if the drafts before that row were right.

    All that sampling looks at (penalties, min_tokens, the position that seeds the draw) follows from it.
    """
    return [sequence for entry in entries if entry.samples for sequence in _positions(entry)]


def _positions(entry: ScheduledSequence) -> Iterator[Sequence]:
    sequence = entry.sequence
    yield sequence
    for count in range(1, len(entry.drafts) + 1):
        yield replace(sequence, token_ids=[*sequence.token_ids, *entry.drafts[:count]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What counts of a step's samples."""

    sampled: Sampled
    """A row per sequence: its first token."""
    verified: dict[int, Verified]
    """Position among the step's entries -> the tokens after it."""


def judge(
    entries: Rows[ScheduledSequence],
    sampled: Sampled,  # rows parallel to sampled_positions(entries)
) -> Judged:
    """Keep what was sampled behind right guesses; the first token always counts."""
    firsts: list[int] = []
    verified: dict[int, Verified] = {}
    row = 0
    for i, entry in enumerate(entries):
        if not entry.samples:
            continue
        firsts.append(row)
        num_right = _num_right(entry.drafts, sampled.token_ids[row : row + len(entry.drafts) + 1])
        if num_right:
            verified[i] = _verified(sampled, row + 1, num_right)
        row += 1 + len(entry.drafts)
    first_of = {row: i for i, row in enumerate(firsts)}
    return Judged(
        sampled=Sampled(
            token_ids=[sampled.token_ids[row] for row in firsts],
            logprobs=None if sampled.logprobs is None else [sampled.logprobs[row] for row in firsts],
            errors={first_of[row]: text for row, text in sampled.errors.items() if row in first_of},
        ),
        verified=verified,
    )


def _num_right(drafts: Rows[int], tokens: Rows[int | None]) -> int:
    """Count the leading drafts that were sampled too, and have a successor."""
    count = 0
    while count < len(drafts) and tokens[count] == drafts[count] and tokens[count + 1] is not None:
        count += 1
    return count


def _verified(sampled: Sampled, first: int, count: int) -> Verified:
    token_ids = [token for token in sampled.token_ids[first : first + count] if token is not None]
    logprobs = None
    if sampled.logprobs is not None:
        logprobs = [entry for entry in sampled.logprobs[first : first + count] if entry is not None]
    return Verified(token_ids=token_ids, logprobs=logprobs or None)
