"""Each tier's share of a replica, counted for the load report."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from replicas.api import TierLoad
from replicas.sequence import Sequence
from replicas.waiting import WaitingQueue


@dataclass(slots=True)
class _Count:
    """One tier as far as it is counted."""

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    held_blocks: int = 0
    waiting_blocks: int = 0


def tier_loads(running: Iterable[Sequence], waiting: WaitingQueue, block_size: int) -> tuple[TierLoad, ...]:
    """Return the tiers that have sequences, best first. O(running + tiers)."""
    counts: defaultdict[int, _Count] = defaultdict(_Count)
    for sequence in running:
        count = counts[sequence.request.tier]
        count.num_running += 1
        count.held_blocks += len(sequence.block_table)
        to_go = len(sequence.token_ids) - sequence.num_computed_tokens
        if to_go > 1:
            count.queued_tokens += to_go
    for tier, queue in waiting.tiers.items():
        count = counts[tier]
        count.num_waiting = len(queue)
        count.waiting_blocks = queue.num_tokens // block_size + len(queue)
        count.queued_tokens += queue.num_tokens
    return tuple(
        TierLoad(
            tier,
            count.num_running,
            count.num_waiting,
            count.queued_tokens,
            count.held_blocks,
            count.waiting_blocks,
        )
        for tier, count in sorted(counts.items(), key=_tier)
    )


def _tier(item: tuple[int, _Count]) -> int:
    return item[0]
