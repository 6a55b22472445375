"""Each backend that runs here against the reference in float32, on the same rounded inputs.

The memory that results will lie in is filled with NaN before, the pool with large numbers: what a kernel
leaves unwritten, or reads where it must not, shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from replicas.attention import BACKENDS, load_backend
from replicas.attention.base import AttentionBackend, AttentionNeeds, GraphableAttention, KVPoolSpec
from replicas.attention.sdpa import SdpaAttention
from replicas.packing import AttentionBatch

Chunk = tuple[int, int, int]
"""Sequence, first position, end."""

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Greatest difference of an output; they are averages of values from N(0, 1)."""
_LENGTHS: Final = (300, 1, 256, 257, 513)
_NUM_BLOCKS: Final = 12
_FOREIGN: Final = 1e4
_STEPS: Final[dict[str, list[Chunk]]] = {
    "prompts": [(0, 0, 299), (1, 0, 1), (2, 0, 255), (3, 0, 250), (4, 0, 256)],
    "chunks over a prefix": [(3, 250, 256), (4, 256, 400)],
    "decodes beside chunks": [(0, 299, 300), (2, 255, 256), (4, 400, 511)],
    "decodes at block boundaries": [(3, 256, 257), (4, 511, 512)],
    "a decode alone": [(4, 512, 513)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.heads}:{self.kv_heads} heads of {self.head_dim}{window}"


SHAPES: Final = (
    Shape(heads=32, kv_heads=8, head_dim=128),
    Shape(heads=16, kv_heads=2, head_dim=64),
    Shape(heads=4, kv_heads=4, head_dim=64),
    Shape(heads=6, kv_heads=1, head_dim=256),
    Shape(heads=16, kv_heads=2, head_dim=64, window=64),
    Shape(heads=4, kv_heads=4, head_dim=128, window=256),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The worst row of one step."""

    step: str
    largest: float
    """Infinite where something is not a number."""

    def passes(self, dtype: torch.dtype) -> bool:
        return self.largest <= TOLERANCE[dtype]


def check_parity(device: torch.device) -> bool:
    """Print one line per backend and shape; return whether all pass."""
    passed = True
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for name in (name for name in BACKENDS if name != "sdpa"):
        try:
            reason = load_backend(name).unavailable(device, dtype)
        except ImportError as error:
            reason = str(error)
        if reason is not None:
            print(f"parity {name}: not checked, {reason}")
            continue
        for shape in SHAPES if device.type == "cuda" else (SHAPES[1], SHAPES[4]):
            differences = list(compare(name, shape, device, dtype))
            failed = [difference.step for difference in differences if not difference.passes(dtype)]
            worst = max(difference.largest for difference in differences)
            verdict = f"FAILED in {', '.join(failed)}" if failed else "ok"
            print(f"parity {name}, {shape}: {verdict} (largest difference {worst:.1e})")
            passed &= not failed
    return passed


def compare(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Difference]:
    """Run all steps through the backend and the reference; graphable ones also padded, in fixed buffers."""
    world = _World(name, shape, device, dtype)
    for step, chunks in _STEPS.items():
        yield Difference(step=step, largest=world.difference(chunks, padded_to=None))
    if isinstance(world.backend, GraphableAttention):
        world.backend.reserve_fixed(8, 3)
        for step in ("decodes at block boundaries", "a decode alone"):
            yield Difference(step=f"{step}, padded", largest=world.difference(_STEPS[step], padded_to=4))


class _World:
    def __init__(self, name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape
        backend_class = load_backend(name)
        self._block_size = backend_class.preferred_block_size
        scale = 256 // self._block_size
        needs = AttentionNeeds(
            num_layers=1,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            windows=(shape.window,),
            softcap=False,
        )
        spec = KVPoolSpec(
            needs=needs,
            num_blocks=_NUM_BLOCKS * scale,
            block_size=self._block_size,
            dtype=dtype,
            device=device,
            num_threads=1,
        )
        self.backend: AttentionBackend = backend_class(spec)
        self._reference = SdpaAttention(replace(spec, dtype=torch.float32))
        for pool in self.backend.pools:
            pool.fill_(_FOREIGN)
        generator = torch.Generator().manual_seed(2)
        self._query, self._key, self._value = (
            [
                torch.randn(length, heads, shape.head_dim, generator=generator).to(device, dtype)
                for length in _LENGTHS
            ]
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        shuffled = torch.randperm(spec.num_blocks, generator=generator).tolist()
        self._tables = [[shuffled.pop() for _ in range(-(-n // self._block_size))] for n in _LENGTHS]

    def difference(self, chunks: list[Chunk], padded_to: int | None) -> float:
        """Return the largest difference of an output, padding rows included."""
        batch = self._batch(chunks)
        rows = padded_to or batch.num_rows
        if isinstance(self.backend, GraphableAttention) and padded_to is not None:
            self.backend.begin_fixed(batch, rows, 3)
        else:
            self.backend.begin_step(batch)
        self._reference.begin_step(batch)
        query, key, value = (self._rows(x, chunks, rows) for x in (self._query, self._key, self._value))
        scaling, window = self._shape.head_dim**-0.5, self._shape.window
        self.backend.store(0, key, value)
        self._reference.store(0, key.float(), value.float())
        _poison(query)
        out = self.backend.attend(0, query, scaling, window, None)
        expected = self._reference.attend(0, query.float(), scaling, window, None)
        return float((out.float() - expected).abs().nan_to_num(nan=torch.inf).max())

    def _batch(self, chunks: list[Chunk]) -> AttentionBatch:
        size = self._block_size
        tables = np.zeros((len(chunks), max(len(self._tables[s]) for s, _, _ in chunks)), dtype=np.int32)
        slots = []
        for i, (sequence, first, end) in enumerate(chunks):
            table = self._tables[sequence]
            tables[i, : len(table)] = table
            slots += [table[p // size] * size + p % size for p in range(first, end)]
        return AttentionBatch(
            query_start_loc=np.cumsum([0, *(end - first for _, first, end in chunks)]).astype(np.int32),
            seq_lens=np.array([end for _, _, end in chunks], dtype=np.int32),
            block_tables=tables,
            slot_mapping=np.array(slots, dtype=np.int32),
        )

    def _rows(self, tensors: list[Tensor], chunks: list[Chunk], rows: int) -> Tensor:
        used = torch.cat([tensors[sequence][first:end] for sequence, first, end in chunks])
        return torch.cat([used, used[:1].expand(rows - len(used), -1, -1)])


def _poison(like: Tensor) -> None:
    """Fill memory that the allocator will hand out next with NaN."""
    poison = [torch.full_like(like, float("nan")) for _ in range(4)]
    del poison
