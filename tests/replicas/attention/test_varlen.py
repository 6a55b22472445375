"""The GPU backends over fake kernels: what they hand to the kernels is right, and padded steps stay in place.

Whether the real kernels keep their side is for `make gpu-check`.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.attention import choose_backend, load_backend, torch_varlen
from replicas.attention.base import AttentionNeeds, GraphableAttention, KVPoolSpec
from replicas.attention.varlen import VarlenAttention
from replicas.errors import ConfigError
from replicas.packing import AttentionBatch
from tests.replicas.attention import fake_kernels

CPU = torch.device("cpu")
NAMES = ("flash", "torch_varlen", "aten_varlen")
NUM_BLOCKS = 12
LENGTHS = [300, 1, 256, 257, 513]
HEAD_DIM = 16


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_kernels.install(monkeypatch)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a few kilobytes: with more, threads wait for each other
    yield
    torch.set_num_threads(num_threads)


class World:
    """The same sequences in a backend under test (bfloat16) and in the reference (float32)."""

    def __init__(self, name: str, heads: int = 4, window: int | None = None, block_size: int = 256) -> None:
        self.window, self.block_size = window, block_size
        needs = AttentionNeeds(
            num_layers=1,
            num_heads=heads,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
            windows=(window,),
            softcap=False,
        )
        self.num_blocks = NUM_BLOCKS * 256 // block_size
        made = []
        for backend, dtype in ((name, torch.bfloat16), ("sdpa", torch.float32)):
            spec = KVPoolSpec(
                needs=needs,
                num_blocks=self.num_blocks,
                block_size=block_size,
                dtype=dtype,
                device=CPU,
                num_threads=1,
            )
            made.append(load_backend(backend)(spec))
        self.backend, self.reference = made
        generator = torch.Generator().manual_seed(2)
        self.query, self.key, self.value = (
            [torch.randn(length, n, HEAD_DIM, generator=generator).bfloat16() for length in LENGTHS]
            for n in (heads, 2, 2)
        )
        shuffled = torch.randperm(self.num_blocks, generator=generator).tolist()
        self.blocks = [[shuffled.pop() for _ in range(-(-n // block_size))] for n in LENGTHS]

    def batch(self, chunks: list[tuple[int, int, int]]) -> AttentionBatch:
        tables = np.zeros((len(chunks), max(len(self.blocks[s]) for s, _, _ in chunks)), dtype=np.int32)
        slots = []
        for i, (sequence, first, end) in enumerate(chunks):
            table = self.blocks[sequence]
            tables[i, : len(table)] = table
            size = self.block_size
            slots += [table[p // size] * size + p % size for p in range(first, end)]
        return AttentionBatch(
            query_start_loc=np.cumsum([0, *(b - a for _, a, b in chunks)]).astype(np.int32),
            seq_lens=np.array([end for _, _, end in chunks], dtype=np.int32),
            block_tables=tables,
            slot_mapping=np.array(slots, dtype=np.int32),
        )

    def rows(self, tensors: list[Tensor], chunks: list[tuple[int, int, int]], padding: int = 0) -> Tensor:
        parts = [tensors[s][a:b] for s, a, b in chunks]
        return torch.cat([*parts, torch.ones(padding, *tensors[0].shape[1:], dtype=torch.bfloat16)])

    def check(self, chunks: list[tuple[int, int, int]], padding: int = 0) -> None:
        """Run a step in both and compare."""
        batch = self.batch(chunks)
        self.backend.begin_step(batch)
        self.reference.begin_step(batch)
        scaling = HEAD_DIM**-0.5
        query, key, value = (self.rows(x, chunks, padding) for x in (self.query, self.key, self.value))
        self.backend.store(0, key, value)
        self.reference.store(0, key.float(), value.float())
        out = self.backend.attend(0, query, scaling, self.window, None)
        expected = self.reference.attend(0, query.float(), scaling, self.window, None)
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "window"), [(2, None), (8, None), (4, 1), (4, 256), (4, 300)])
def test_prompts_chunks_decodes_and_mixtures_equal_the_reference(
    name: str, heads: int, window: int | None
) -> None:
    world = World(name, heads, window)
    world.check([(i, 0, length) for i, length in enumerate([299, 1, 255, 230, 256])], padding=3)
    world.check([(0, 299, 300), (2, 255, 256), (3, 230, 256), (4, 256, 511)])
    world.check([(3, 256, 257), (4, 511, 512)])
    world.check([(4, 512, 513)])


def test_aten_reads_any_block_size() -> None:
    world = World("aten_varlen", block_size=32, window=70)
    world.check([(0, 0, 299), (4, 0, 40), (1, 0, 1)])
    world.check([(0, 299, 300), (4, 40, 41)])


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0+cu130"])
@pytest.mark.parametrize("window", [None, 100])
def test_splits_are_asked_for_only_where_they_are_right(
    monkeypatch: pytest.MonkeyPatch, version: str, window: int | None
) -> None:
    """The fake kernel knows what each version of torch accepts."""
    monkeypatch.setattr(torch_varlen.torch, "__version__", version)
    for heads in (2, 8):
        world = World("torch_varlen", heads, window)
        world.check([(0, 0, 299), (4, 0, 40)])
        world.check([(0, 299, 300), (4, 40, 41)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_fixed_step_is_padded_and_lies_where_the_last_one_lay(name: str, window: int | None) -> None:
    world = World(name, 4, window)
    backend = world.backend
    assert isinstance(backend, GraphableAttention)
    world.check([(i, 0, length - 1) for i, length in enumerate(LENGTHS) if length > 1])
    backend.reserve_fixed(8, 3)
    addresses = set()
    for step in ([(0, 299, 300), (4, 512, 513)], [(1, 0, 1), (2, 255, 256), (3, 256, 257)]):
        batch = world.batch(step)
        backend.begin_fixed(batch, 4, 3)
        query, key, value = (
            world.rows(x, step, 4 - len(step)) for x in (world.query, world.key, world.value)
        )
        backend.store(0, key, value)
        out = backend.attend(0, query, HEAD_DIM**-0.5, window, None)
        world.reference.begin_step(batch)
        world.reference.store(0, key.float(), value.float())
        expected = world.reference.attend(0, query.float(), HEAD_DIM**-0.5, window, None)
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
        assert isinstance(backend, VarlenAttention)
        addresses.add(backend._tensors.block_tables.data_ptr())
        assert backend._arrays.max_seq_len == 3 * 256
    assert len(addresses) == 1


@pytest.mark.parametrize("name", NAMES)
def test_padding_writes_to_no_block_of_the_pool(name: str) -> None:
    world = World(name)
    backend = world.backend
    assert isinstance(backend, GraphableAttention)
    backend.reserve_fixed(8, 3)
    backend.begin_fixed(world.batch([(1, 0, 1)]), 8, 3)
    ones = torch.ones(8, 2, HEAD_DIM, dtype=torch.bfloat16)
    backend.store(0, ones, ones)
    written = {block for pool in backend.pools for block in range(len(pool)) if pool[block].any()}
    assert all(len(pool) == NUM_BLOCKS for pool in backend.pools)
    assert written == {world.blocks[1][0]}


def test_backends_say_why_they_cannot_run() -> None:
    shape = AttentionNeeds(
        num_layers=1, num_heads=4, num_kv_heads=2, head_dim=36, windows=(None,), softcap=True
    )
    for name in NAMES:
        with pytest.raises(
            ConfigError, match=f"'{name}' cannot run here: it computes on CUDA GPUs, not on cpu"
        ):
            choose_backend(name, CPU, torch.bfloat16, shape)
        assert "multiple of 8 up to 256, not 36" in (load_backend(name).unsupported(shape) or "")
    with pytest.raises(ConfigError, match=r"'numba_cpu' cannot run here: it computes in float32"):
        choose_backend("numba_cpu", CPU, torch.bfloat16, shape)


def test_a_soft_cap_is_refused_by_kernels_without_one() -> None:
    needs = AttentionNeeds(
        num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64, windows=(None,), softcap=True
    )
    lacking = [
        name
        for name in ("flash", "torch_varlen", "aten_varlen", "sdpa")
        if load_backend(name).unsupported(needs)
    ]
    assert lacking == ["torch_varlen", "aten_varlen"]
