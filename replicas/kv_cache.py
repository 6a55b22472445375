"""KVCacheManager: which block holds which tokens of which sequence.

One pool of fixed-size blocks serves all sequences. A sequence's block table names its blocks in order
of position; token p of a sequence lives in block `table[p // block_size]`, row `p % block_size`:

    sequence A  tokens 0..36     table [4, 0, 7]
    sequence B  tokens 0..20     table [4, 2]         block size 16

    block      0        1        2        3        4        5        6        7
            A 16..31   free   B 16..20   free   A+B 0..15  free     free   A 32..36
            refs 1      0        1        0      refs 2      0        0      refs 1

Block 4 is shared: A and B start with the same 16 tokens, so B took it from the prefix cache. Only full
blocks are ever shared, and a full block is never written again, so sharing needs no copy. The tensors
behind the blocks, `[num_blocks, kv_heads, block_size, head_dim]` for K and for V in each layer, belong
to the runner; this file knows only numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from replicas.block_pool import BlockPool, chain_hash, root_hash
from replicas.errors import IntegrityError
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Leading blocks of a sequence that the cache already holds."""

    block_ids: list[int]
    num_tokens: int


class KVCacheManager:
    """Gives sequences their blocks and takes them back. Decides nothing about order or preemption."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest cached prefix of the sequence's tokens. Takes no reference.

        The last token is never matched: it must be computed to have logits to sample from. Nor are those
        whose logits are still to be reported.
        """
        if not self.enable_prefix_caching:
            return PrefixMatch(block_ids=[], num_tokens=0)
        size = self.block_size
        block_ids: list[int] = []
        for i in range(sequence.num_reusable_tokens // size):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            block_id = self.pool.find(self._block_hash(sequence, i), tokens)
            if block_id is None:
                break
            block_ids.append(block_id)
        return PrefixMatch(block_ids=block_ids, num_tokens=len(block_ids) * size)

    def num_blocks_missing(self, match: PrefixMatch, num_tokens: int) -> int:
        """Blocks that `start` would take out of the free queue for `num_tokens` tokens."""
        idle_hits = sum(self.pool.ref_count(block_id) == 0 for block_id in match.block_ids)
        return self.num_blocks_for(num_tokens) - len(match.block_ids) + idle_hits

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence without blocks its matched prefix and blocks for all its tokens."""
        assert not sequence.block_table, f"sequence {sequence.seq_id} already holds blocks"
        self.pool.acquire(match.block_ids)
        sequence.block_table = list(match.block_ids)
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_registered_blocks = len(match.block_ids)
        self.extend(sequence)

    def num_blocks_to_extend(self, sequence: Sequence) -> int:
        return max(0, self.num_blocks_for(sequence.num_tokens) - len(sequence.block_table))

    def extend_ahead(self, entries: Iterable[ScheduledSequence]) -> bool:
        """Give sequences the blocks into which `entries` write; False, and nothing given, if they lack."""
        wanted = [
            (entry.sequence, self.num_blocks_for(entry.start + entry.num_new_tokens)) for entry in entries
        ]
        missing = [(sequence, count - len(sequence.block_table)) for sequence, count in wanted]
        if sum(max(0, count) for _, count in missing) > self.num_free_blocks:
            return False
        for sequence, count in missing:
            if count > 0:
                sequence.block_table += self.pool.allocate(count)
        return True

    def extend(self, sequence: Sequence) -> None:
        """Allocate what the sequence lacks to hold all its tokens; the caller made room."""
        missing = self.num_blocks_to_extend(sequence)
        if missing:
            sequence.block_table += self.pool.allocate(missing)

    def extend_for(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for so many tokens if they are free; else False, and nothing given."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if missing > self.num_free_blocks:
            return False
        if missing > 0:
            sequence.block_table += self.pool.allocate(missing)
        return True

    def register_computed(self, sequence: Sequence) -> None:
        """Tell the prefix cache about blocks that have become full and computed."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(sequence.num_registered_blocks, sequence.num_computed_tokens // size):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            self.pool.register(sequence.block_table[i], self._block_hash(sequence, i), tokens)
            sequence.num_registered_blocks = i + 1

    def release(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back. Harmless when it holds none."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0

    def num_sole_blocks(self, sequence: Sequence, except_for: set[int]) -> int:
        """Blocks that would become free if the sequence gave its own back, some left out of the count."""
        return sum(
            self.pool.ref_count(block_id) == 1 and block_id not in except_for
            for block_id in sequence.block_table
        )

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Check that the pool's books match the block tables of `holders`. Raises IntegrityError."""
        references: dict[int, int] = {}
        for sequence in holders:
            if len(set(sequence.block_table)) != len(sequence.block_table):
                raise IntegrityError(
                    f"sequence {sequence.seq_id} holds a block twice: {sequence.block_table}"
                )
            if sequence.num_computed_tokens > len(sequence.block_table) * self.block_size:
                raise IntegrityError(
                    f"sequence {sequence.seq_id}: {sequence.num_computed_tokens} tokens computed, "
                    f"{len(sequence.block_table)} blocks held"
                )
            for block_id in sequence.block_table:
                references[block_id] = references.get(block_id, 0) + 1
        self.pool.check(references)

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of a full block of the sequence; computed once, kept on the sequence."""
        hashes = sequence.block_hashes
        size = self.block_size
        while len(hashes) <= index:
            i = len(hashes)
            parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
            hashes.append(chain_hash(parent, sequence.token_ids[i * size : (i + 1) * size]))
        return hashes[index]
