"""Room: a seat and blocks for a sequence that waits, free ones or those of running sequences it outranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from replicas.config import ResolvedConfig
from replicas.kv_cache import KVCacheManager, PrefixMatch
from replicas.sequence import Sequence
from replicas.waiting import effective_tier

HEADROOM_TOKENS: Final = 8
"""A sequence starts only if every running one can still grow by this many tokens: otherwise it would
be preempted again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Whether a waiting sequence can start now, and whom it must push out for that."""

    has_seat: bool
    has_blocks: bool
    victims: list[Sequence]


def by_rank(sequences: Iterable[Sequence], now: float, aging_s: float) -> list[Sequence]:
    """Best first: (effective tier, arrival). Finished rows of a static batch come last."""
    return sorted(sequences, key=lambda s: (effective_tier(s, now, aging_s), s.arrival_at, s.seq_id))


class RoomFinder:
    """Looks for room in one engine; changes nothing."""

    def __init__(self, config: ResolvedConfig, cache: KVCacheManager) -> None:
        self._config = config
        self._cache = cache

    def find(self, sequence: Sequence, match: PrefixMatch, running: list[Sequence], now: float) -> Room:
        """Look for a seat and blocks beside `running`, free ones first, then those of outranked sequences.

        A victim is outranked by the newcomer's own tier, not by its aged one: age moves a sequence up
        in the queue and shields it once it runs, but only a better tier takes a seat from somebody.
        """
        has_seat = len(running) < self._config.max_num_seqs
        available = self._cache.num_free_blocks
        has_blocks = available >= self._num_blocks_missing(sequence, match, running)
        if (has_seat and has_blocks) or not self._config.takes_seats:
            return Room(has_seat=has_seat, has_blocks=has_blocks, victims=[])
        aging_s = self._config.aging_s
        others = by_rank(running, now, aging_s)
        victims: list[Sequence] = []
        matched = set(match.block_ids)
        while others and effective_tier(others[-1], now, aging_s) > sequence.tier:
            victims.append(others.pop())
            available += self._cache.num_sole_blocks(victims[-1], except_for=matched)
            if available >= self._num_blocks_missing(sequence, match, others):
                return Room(has_seat=True, has_blocks=True, victims=victims)
        return Room(has_seat=has_seat or bool(victims), has_blocks=False, victims=[])

    def _num_blocks_missing(self, sequence: Sequence, match: PrefixMatch, others: list[Sequence]) -> int:
        """Free blocks that must exist before `sequence` starts beside `others`."""
        if self._config.preemption:
            headroom = len(others) * HEADROOM_TOKENS // self._config.block_size
            return headroom + self._cache.num_blocks_missing(match, sequence.num_tokens)
        reserved = sum(
            self._cache.num_blocks_for(other.max_num_tokens) - len(other.block_table) for other in others
        )
        return reserved + self._cache.num_blocks_missing(match, sequence.max_num_tokens)
