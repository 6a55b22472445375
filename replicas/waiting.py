"""WaitingQueue: sequences that have no seat, in the order in which they may take one."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from replicas.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class TierQueue:
    """One tier: preempted sequences first, both parts in order of dispatch."""

    preempted: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    fresh: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    """Tokens to be computed before all of them decode (prefix hits not known yet)."""

    def __len__(self) -> int:
        return len(self.preempted) + len(self.fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.preempted.values()
        yield from self.fresh.values()

    def head(self) -> Sequence:
        return next(iter(self))


def effective_tier(sequence: Sequence, now: float, aging_s: float) -> int:
    """The tier a sequence competes in: one better for each `aging_s` it has waited in all.

    Time spent running does not count, time lost to preemption does: a sequence that others pushed out
    again and again ends above them.
    """
    waited_s = sequence.waited_s
    if sequence.status is SequenceStatus.WAITING:
        waited_s += max(0.0, now - sequence.waiting_since)
    return sequence.tier - math.floor(waited_s / aging_s)


def prefill_tier(sequence: Sequence, now: float, aging_s: float) -> int:
    """The tier in which a running prefill competes for the rest of its prompt: time with a seat counts, or
    a better tier that always has prompts would keep it from its first token for good."""
    return sequence.tier - math.floor((now - sequence.arrival_at) / aging_s)


class WaitingQueue:
    """One FIFO per tier; only their heads are compared, so age never needs a re-sort.

    Order: (tier - floor(waited / aging_s), preempted first, dispatch order). Keys that contain the
    present time must not live in a heap: they change while they lie there (vllm#20608).
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._tiers: dict[int, TierQueue] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._tiers.values())

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._tiers.values():
            yield from queue

    @property
    def tiers(self) -> dict[int, TierQueue]:
        """Tiers that have waiting sequences."""
        return self._tiers

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence behind the others of its tier."""
        queue = self._enter(sequence, now)
        queue.fresh[sequence.seq_id] = sequence

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that lost its seat, or waited for a sibling, ahead of the fresh ones."""
        queue = self._enter(sequence, now)
        later = [s for s in queue.preempted.values() if s.seq_id > sequence.seq_id]
        queue.preempted[sequence.seq_id] = sequence
        for other in later:
            queue.preempted.move_to_end(other.seq_id)

    def remove(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out, to run or to end. O(1)."""
        queue = self._tiers[sequence.tier]
        part = queue.preempted if sequence.seq_id in queue.preempted else queue.fresh
        del part[sequence.seq_id]
        queue.num_tokens -= sequence.num_tokens
        if not queue:
            del self._tiers[sequence.tier]
        sequence.waited_s += max(0.0, now - sequence.waiting_since)

    def next(self, now: float, excluded_tiers: set[int]) -> Sequence | None:
        """The head that comes first now, among the tiers not excluded."""
        heads = [queue.head() for tier, queue in self._tiers.items() if tier not in excluded_tiers]
        return min(heads, key=lambda head: self._key(head, now), default=None)

    def _key(self, sequence: Sequence, now: float) -> tuple[int, bool, int]:
        is_fresh = sequence.seq_id in self._tiers[sequence.tier].fresh
        return effective_tier(sequence, now, self._aging_s), is_fresh, sequence.seq_id

    def _enter(self, sequence: Sequence, now: float) -> TierQueue:
        sequence.waiting_since = now
        queue = self._tiers.setdefault(sequence.tier, TierQueue())
        queue.num_tokens += sequence.num_tokens
        return queue
