"""BlockPool: who holds which KV block, and which free blocks still hold a known prefix."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replicas.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Block:
    """One KV block. Linked into the free queue exactly while `ref_count` is 0.

    The queue is threaded through the blocks themselves because a prefix hit takes a block out of its
    middle: a deque would need O(n) for that, a heap would forget the order of release.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    """Chained hash of the content while the prefix cache knows this block."""
    token_ids: tuple[int, ...] = ()
    """The block's tokens, kept to re-check a hit: a hash alone never decides."""
    previous: "Block | None" = None
    next: "Block | None" = None


def root_hash(cache_salt: str) -> bytes:
    """Start of a hash chain. Different salts never share a block."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"headway-kv-root").digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block: its tokens and, through `parent`, all tokens before it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks with a prefix cache over the free ones.

    A block whose last reference goes keeps its content and its hash, and waits in the free queue;
    a later prompt with the same prefix takes it back. `allocate` hands out the head of the queue:
    first blocks without a hash, then the least recently used. All operations are O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._cached: dict[bytes, Block] = {}
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next, self._tail.previous = self._tail, self._head
        self.num_free = 0
        for block in self._blocks:
            self._link_before(self._tail, block)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_cached(self) -> int:
        """Blocks whose content the prefix cache knows, in use or free."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, one reference each; their old content is forgotten.

        The caller checks `num_free` first; asking for more is a bug.
        """
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = []
        for _ in range(count):
            block = self._head.next
            assert block is not None
            self._unlink(block)
            self._forget(block)
            block.ref_count = 1
            taken.append(block.block_id)
        return taken

    def find(self, block_hash: bytes, token_ids: Sequence[int]) -> int | None:
        """The block that holds this prefix, or None. Takes no reference."""
        block = self._cached.get(block_hash)
        if block is None or block.token_ids != tuple(token_ids):
            return None
        return block.block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Take one more reference of each block, out of the free queue where it was there."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._unlink(block)
            block.ref_count += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference of each block of one sequence.

        The last block is queued first: a prefix is useful without its tail, a tail is not without
        its prefix.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} released without a reference"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._link_before(self._tail if block.block_hash else self._first_link(), block)

    def register(self, block_id: int, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Make a full, computed block known to the prefix cache. The first of equal blocks stays."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} registered while free"
        if block_hash in self._cached or block.block_hash is not None:
            return
        block.block_hash = block_hash
        block.token_ids = tuple(token_ids)
        self._cached[block_hash] = block

    def forget_all(self) -> None:
        """Drop the whole prefix cache; references stay."""
        for block in list(self._cached.values()):
            self._forget(block)

    def check(self, references: dict[int, int]) -> None:
        """Compare the books with `references` (block id -> number of holders). Raises IntegrityError."""
        free_ids = []
        block = self._head.next
        while block is not None and block is not self._tail:
            free_ids.append(block.block_id)
            block = block.next
        if len(free_ids) != self.num_free or len(set(free_ids)) != len(free_ids):
            raise IntegrityError(f"free queue holds {len(free_ids)} blocks, the count says {self.num_free}")
        free = set(free_ids)
        for block in self._blocks:
            expected = references.get(block.block_id, 0)
            if block.ref_count != expected:
                raise IntegrityError(
                    f"block {block.block_id}: {block.ref_count} references, {expected} holders"
                )
            if (block.ref_count == 0) != (block.block_id in free):
                raise IntegrityError(
                    f"block {block.block_id}: {block.ref_count} references and in the free queue"
                )
            if block.block_hash is not None and self._cached.get(block.block_hash) is not block:
                raise IntegrityError(f"block {block.block_id} has a hash that the prefix cache does not know")
        if len(self._cached) != sum(block.block_hash is not None for block in self._blocks):
            raise IntegrityError(
                f"the prefix cache knows {len(self._cached)} blocks, not as many have a hash"
            )

    def _first_link(self) -> Block:
        first = self._head.next
        assert first is not None
        return first

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None
            block.token_ids = ()

    def _link_before(self, successor: Block, block: Block) -> None:
        predecessor = successor.previous
        assert predecessor is not None
        predecessor.next = successor.previous = block
        block.previous, block.next = predecessor, successor
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        before, after = block.previous, block.next
        assert before is not None, f"block {block.block_id} is not free"
        assert after is not None, f"block {block.block_id} is not free"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self.num_free -= 1
