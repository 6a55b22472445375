"""Each tier's share of a replica, counted for the load report."""

from collections import Counter
from collections.abc import Iterable

from replicas.api import TierLoad
from replicas.sequence import Sequence
from replicas.waiting import WaitingQueue


def tier_loads(running: Iterable[Sequence], waiting: WaitingQueue, block_size: int) -> tuple[TierLoad, ...]:
    """Return the tiers that have sequences, best first. O(running + tiers)."""
    num_running: Counter[int] = Counter()
    queued_tokens: Counter[int] = Counter()
    held_blocks: Counter[int] = Counter()
    for sequence in running:
        tier = sequence.request.tier
        num_running[tier] += 1
        held_blocks[tier] += len(sequence.block_table)
        to_go = len(sequence.token_ids) - sequence.num_computed_tokens
        if to_go > 1:
            queued_tokens[tier] += to_go
    num_waiting: Counter[int] = Counter()
    waiting_blocks: Counter[int] = Counter()
    for tier, queue in waiting.tiers.items():
        num_waiting[tier] = len(queue)
        waiting_blocks[tier] = queue.num_tokens // block_size + len(queue)
        queued_tokens[tier] += queue.num_tokens
    return tuple(
        TierLoad(
            tier,
            num_running[tier],
            num_waiting[tier],
            queued_tokens[tier],
            held_blocks[tier],
            waiting_blocks[tier],
        )
        for tier in sorted(num_running.keys() | num_waiting.keys())
    )
