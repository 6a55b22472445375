import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.attention import choose_backend, load_backend
from replicas.attention.base import AttentionBackend, AttentionNeeds, KVPoolSpec
from replicas.errors import ConfigError
from replicas.packing import AttentionBatch

NUM_BLOCKS = 40
CPU = torch.device("cpu")


class Case:
    """One layer with sequences of random K, V and queries for every position."""

    def __init__(
        self, *, heads: int = 6, kv_heads: int = 2, head_dim: int = 32, block_size: int = 16
    ) -> None:
        self.block_size = block_size
        self.needs = AttentionNeeds(
            num_layers=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            windows=(None,),
            softcap=False,
        )
        self.lengths = [37, 1, 64, 90]
        generator = torch.Generator().manual_seed(1)
        self.query, self.key, self.value = (
            [torch.randn(length, n, head_dim, generator=generator) for length in self.lengths]
            for n in (heads, kv_heads, kv_heads)
        )
        shuffled = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.blocks = [[shuffled.pop() for _ in range(-(-n // block_size))] for n in self.lengths]

    def backend(self, name: str, num_threads: int = 2) -> AttentionBackend:
        return load_backend(name)(
            KVPoolSpec(
                needs=self.needs,
                num_blocks=NUM_BLOCKS,
                block_size=self.block_size,
                dtype=torch.float32,
                device=CPU,
                num_threads=num_threads,
            )
        )

    def step(
        self,
        backend: AttentionBackend,
        chunks: list[tuple[int, int, int]],  # sequence, first position, end
        window: int | None = None,
        softcap: float | None = None,
        padding: int = 0,
    ) -> list[Tensor]:
        """Run one step; returns the outputs of each chunk."""
        lengths = [end - first for _, first, end in chunks]
        tables = np.zeros((len(chunks), max(map(len, self.blocks))), dtype=np.int32)
        slots = []
        for i, (sequence, first, end) in enumerate(chunks):
            table = self.blocks[sequence]
            tables[i, : len(table)] = table
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in range(first, end)
            ]
        backend.begin_step(
            AttentionBatch(
                query_start_loc=np.cumsum([0, *lengths]).astype(np.int32),
                seq_lens=np.array([end for _, _, end in chunks], dtype=np.int32),
                block_tables=tables,
                slot_mapping=np.array(slots, dtype=np.int32),
            )
        )
        query, key, value = (
            torch.cat([*(rows[s][a:b] for s, a, b in chunks), torch.ones(padding, *rows[0].shape[1:])])
            for rows in (self.query, self.key, self.value)
        )
        backend.store(0, key, value)
        out = backend.attend(0, query, self.needs.head_dim**-0.5, window, softcap)
        assert out.shape == query.shape
        assert not out[len(slots) :].any()
        return list(torch.split(out[: len(slots)], lengths))


def formula(case: Case, sequence: int, window: int | None, softcap: float | None) -> Tensor:
    """Attention of a whole sequence, in float64, written down from its definition."""
    groups = case.needs.num_heads // case.needs.num_kv_heads
    q = case.query[sequence].double()
    k = case.key[sequence].double().repeat_interleave(groups, dim=1)
    v = case.value[sequence].double().repeat_interleave(groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
    hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v).float()


@pytest.mark.parametrize("name", ["sdpa", "numba_cpu"])
@pytest.mark.parametrize("window", [None, 1, 16, 21])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equals_the_formula(name: str, window: int | None, softcap: float | None) -> None:
    case = Case()
    chunks = [(i, 0, length) for i, length in enumerate(case.lengths)]
    for i, out in enumerate(case.step(case.backend(name), chunks, window, softcap, padding=3)):
        torch.testing.assert_close(out, formula(case, i, window, softcap), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("heads", [(1, 1, 16), (7, 1, 64), (9, 3, 64), (4, 4, 24), (2, 1, 100), (8, 2, 256)])
def test_numba_equals_the_reference_for_any_heads(heads: tuple[int, int, int]) -> None:
    case = Case(heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
    chunks = [(3, 0, 90), (0, 0, 37)]
    results = [case.step(case.backend(name), chunks) for name in ("numba_cpu", "sdpa")]
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize("name", ["sdpa", "numba_cpu"])
@pytest.mark.parametrize("window", [None, 21])
def test_bits_do_not_depend_on_batch_chunks_blocks_or_threads(name: str, window: int | None) -> None:
    case = Case()
    [whole] = case.step(case.backend(name), [(3, 0, 90)], window)

    chunked = case.backend(name, num_threads=1)
    parts = [case.step(chunked, [(3, a, b)], window)[0] for a, b in [(0, 5), (5, 22), (22, 89), (89, 90)]]
    assert torch.equal(torch.cat(parts), whole)

    batched = case.backend(name)
    case.step(batched, [(0, 0, 36), (3, 0, 40), (2, 0, 10)], window)
    mixed = case.step(batched, [(0, 36, 37), (1, 0, 1), (3, 40, 90), (2, 10, 64)], window)
    assert torch.equal(mixed[2], whole[40:])

    case.blocks[3].reverse()
    [moved] = case.step(case.backend(name), [(3, 0, 90)], window)
    assert torch.equal(moved, whole)


def test_block_size_does_not_change_the_bits_of_numba() -> None:
    small, large = Case(block_size=16), Case(block_size=48)
    [a] = small.step(small.backend("numba_cpu"), [(3, 0, 90)])
    [b] = large.step(large.backend("numba_cpu"), [(3, 0, 90)])
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["sdpa", "numba_cpu"])
@pytest.mark.parametrize("poison", [float("nan"), 1e30, float("inf")])
def test_nothing_outside_a_sequence_is_read(name: str, poison: float) -> None:
    case = Case()
    chunks = [(0, 0, 37), (3, 0, 90)]
    clean = case.step(case.backend(name), chunks, 21)
    poisoned = case.backend(name)
    for pool in poisoned.pools:
        assert pool.shape[0] == NUM_BLOCKS
        pool.fill_(poison)
    # Poison stays in other blocks and behind the last token of the last block.
    for ours, expected in zip(case.step(poisoned, chunks, 21), clean, strict=True):
        assert torch.equal(ours, expected)


def test_a_pool_begins_zeroed() -> None:
    case = Case()
    for name in ("sdpa", "numba_cpu"):
        assert not any(pool.any() for pool in case.backend(name).pools)


def test_auto_takes_numba_for_float32_on_cpu_and_the_reference_otherwise() -> None:
    assert choose_backend("auto", CPU, torch.float32, Case().needs).name == "numba_cpu"
    assert choose_backend("auto", CPU, torch.bfloat16, Case().needs).name == "sdpa"


def test_a_backend_that_cannot_run_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"'numba_cpu' cannot run here: it computes in float32"):
        choose_backend("numba_cpu", CPU, torch.bfloat16, Case().needs)
    with pytest.raises(ConfigError, match=r"unknown attention backend 'flsh'; known are auto, flash, "):
        choose_backend("flsh", CPU, torch.float32, Case().needs)
