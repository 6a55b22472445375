import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from replicas.block_pool import BlockPool, chain_hash, root_hash
from replicas.errors import IntegrityError


def test_allocate_hands_out_blocks_in_order_and_takes_the_oldest_back() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    assert pool.num_free == 3
    assert pool.allocate(1) == [0]


def test_release_keeps_hashed_blocks_for_last_and_evicts_tail_before_prefix() -> None:
    pool = BlockPool(3)
    first, second, plain = pool.allocate(3)
    one = chain_hash(root_hash(""), [1])
    two = chain_hash(one, [2])
    pool.register(first, one, [1])
    pool.register(second, two, [2])
    pool.release([first, second, plain])
    assert pool.allocate(1) == [plain]
    assert pool.find(two, [2]) == second
    assert pool.allocate(1) == [second]
    assert pool.find(two, [2]) is None
    assert pool.find(one, [1]) == first


def test_acquire_takes_a_block_out_of_the_middle_of_the_free_queue() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    hashes = [chain_hash(root_hash(""), [i]) for i in blocks]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash, [block])
        pool.release([block])
    pool.acquire([1])
    assert pool.allocate(2) == [0, 2]
    assert pool.find(hashes[1], [1]) == 1


def test_a_hash_alone_never_decides() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    block_hash = chain_hash(root_hash(""), [1, 2])
    pool.register(block, block_hash, [1, 2])
    assert pool.find(block_hash, [1, 2]) == block
    assert pool.find(block_hash, [1, 3]) is None


def test_salts_and_prefixes_change_the_hash() -> None:
    assert chain_hash(root_hash("a"), [1]) != chain_hash(root_hash("b"), [1])
    assert chain_hash(chain_hash(root_hash(""), [1]), [2]) != chain_hash(root_hash(""), [2])


def test_check_reports_a_missing_reference() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.check({0: 1})
    with pytest.raises(IntegrityError, match="block 0: 1 references, 2 holders"):
        pool.check({0: 2})
    with pytest.raises(IntegrityError, match="block 1: 0 references, 1 holders"):
        pool.check({0: 1, 1: 1})


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: lists of holders."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.holders: list[list[int]] = []
        self.known: dict[bytes, int] = {}

    @rule(target=held, count=st.integers(1, 3))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            return []
        blocks = self.pool.allocate(count)
        self.holders.append(blocks)
        self.known = {h: b for h, b in self.known.items() if b not in blocks}
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks: list[int]) -> list[int]:
        if blocks not in self.holders:
            return []
        shared = list(blocks)
        self.pool.acquire(shared)
        self.holders.append(shared)
        return shared

    @rule(blocks=consumes(held))
    def release(self, blocks: list[int]) -> None:
        if blocks in self.holders:
            self.holders.remove(blocks)
            self.pool.release(blocks)

    @rule(blocks=held, token=st.integers(0, 3))
    def register(self, blocks: list[int], token: int) -> None:
        if not blocks or blocks not in self.holders:
            return
        block_hash = chain_hash(root_hash(""), [token])
        if block_hash not in self.known and blocks[0] not in self.known.values():
            self.known[block_hash] = blocks[0]
        self.pool.register(blocks[0], block_hash, [token])

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        token = data.draw(st.integers(0, 3))
        block_hash = chain_hash(root_hash(""), [token])
        found = self.pool.find(block_hash, [token])
        assert found == self.known.get(block_hash)
        if found is not None:
            self.pool.acquire([found])
            self.pool.release([found])

    @invariant()
    def books_balance(self) -> None:
        references: dict[int, int] = {}
        for blocks in self.holders:
            for block in blocks:
                references[block] = references.get(block, 0) + 1
        self.pool.check(references)
        assert self.pool.num_cached == len(self.known)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
