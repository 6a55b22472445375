"""How fast: decode and prefill of a model with random weights, beside the floor that memory sets."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaConfig

from replicas.api import GenerateRequest, SamplingParams
from replicas.attention import choose_backend
from replicas.attention.base import GraphableAttention, KVPoolSpec
from replicas.config import ResolvedConfig
from replicas.cuda_graphs import CudaRecorder
from replicas.engine import Engine
from replicas.model import LoadedModel, build_random_model
from replicas.model_profile import kv_budget, measure_memory
from replicas.model_rotary import tabulate_rotary
from replicas.runner import TorchRunner
from replicas.runner_ahead import AheadRunner
from replicas.step import Step, StepResult

_UTILIZATION: Final = 0.9
_CPU_KV_BYTES: Final = 32 << 20
_MARGIN_TOKENS: Final = 8
"""Decodes that nobody times: the first ones, while the last prompts are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    model: dict[str, Any]
    """Arguments of LlamaConfig."""
    batches: tuple[int, ...]
    context: int
    """Tokens of a sequence when its decodes are timed."""
    prompts: tuple[int, ...]
    num_steps: int
    """Timed per batch size."""
    copy_bytes: int
    """Size of the tensor whose copy measures bandwidth: far above any cache."""


LARGE: Final = Plan(
    model={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16_384,
    },
    batches=(1, 8, 32, 64, 128, 256),
    context=1024,
    prompts=(512, 8192),
    num_steps=50,
    copy_bytes=4 << 30,
)
"""8B parameters, in the shape of Llama 3."""

TINY: Final = Plan(
    model={
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    batches=(1, 4),
    context=24,
    prompts=(16, 48),
    num_steps=5,
    copy_bytes=8 << 20,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """One batch size."""

    batch: int
    step_ms: float
    """Median, steps overlapping with the host's work."""
    waiting_step_ms: float
    """Median, the host's work done while the device waits."""
    floor_ms: float
    """Weights and the KV of all sequences read once, at the bandwidth of a copy."""
    scheduler_ms: float
    """The scheduler's share of a step, packing and launching apart."""

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_ms * 1e3

    @property
    def floor_share(self) -> float:
        return self.floor_ms / self.step_ms

    @property
    def hidden_ms(self) -> float:
        """Host's work per step that the device no longer waits for."""
        return self.waiting_step_ms - self.step_ms


def measure(device: torch.device, plan: Plan) -> list[Decode]:
    """Print the table; returns its rows of decodes."""
    torch.manual_seed(1)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    bench = Bench(build_random_model(LlamaConfig(**plan.model), device, dtype), plan)
    bandwidth = copy_bytes_per_s(device, plan.copy_bytes)
    print(f"weights {bench.weight_bytes / 1e9:.2f} GB, copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    print(f"attention {bench.backend.name}, context {plan.context}, {bench.num_blocks} KV blocks")
    print("batch  ms/step   tok/s  of the floor  scheduler ms  host ms hidden")
    decodes = []
    for batch in plan.batches:
        if bench.blocks_for(batch) > bench.num_blocks:
            print(f"{batch:5}  does not fit into the KV pool")
            continue
        row = bench.decode(batch, bandwidth)
        decodes.append(row)
        print(
            f"{row.batch:5}  {row.step_ms:7.2f} {row.tokens_per_s:7.0f}  {row.floor_share:11.0%}  "
            f"{row.scheduler_ms:12.3f}  {row.hidden_ms:14.3f}"
        )
    for length in plan.prompts:
        print(f"prefill of {length} tokens: {bench.prefill(length):.0f} tok/s")
    return decodes


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy, the best of five."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    durations = []
    for _ in range(5):
        _wait(device)
        started_at = time.perf_counter()
        target.copy_(source)
        _wait(device)
        durations.append(time.perf_counter() - started_at)
    return 2 * num_bytes / min(durations)


class Bench:
    """A model, its KV pool and one runner for all measurements."""

    def __init__(self, model: LoadedModel, plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._device = model.device
        self._decode_len = plan.context + plan.num_steps + 2 * _MARGIN_TOKENS
        self._max_len = max(self._decode_len, *plan.prompts) + 1
        self._max_num_seqs = max(plan.batches)
        tabulate_rotary(model.module, self._max_len)
        backend_class = choose_backend("auto", model.device, model.dtype, model.needs)
        self._block_size = backend_class.preferred_block_size
        needs = model.needs
        per_layer = 2 * needs.num_kv_heads * needs.head_dim * model.dtype.itemsize
        self._kv_bytes_per_token = needs.num_layers * per_layer
        block_bytes = self._block_size * backend_class.kv_bytes_per_token(model.needs, model.dtype)
        wanted = max(self.blocks_for(self._max_num_seqs), -(-self._max_len // self._block_size))
        self.num_blocks = min(wanted, self._kv_bytes() // block_bytes)
        spec = KVPoolSpec(
            needs=needs,
            num_blocks=self.num_blocks,
            block_size=self._block_size,
            dtype=model.dtype,
            device=model.device,
            num_threads=1,
        )
        self.backend = backend_class(spec)
        self._runner = AheadRunner(model, self.backend, None, block_size=self._block_size)
        if self._device.type == "cuda" and isinstance(self.backend, GraphableAttention):
            self._runner.record_graphs(CudaRecorder(), self._max_num_seqs, self._decode_len)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that every step reads: of the input embedding it reads a few rows."""
        parameters = self._model.module.named_parameters()
        return sum(p.numel() * p.element_size() for name, p in parameters if "embed_tokens" not in name)

    def blocks_for(self, batch: int) -> int:
        """Return the KV blocks that a batch of decodes needs."""
        return batch * -(-self._decode_len // self._block_size)

    def decode(self, batch: int, bandwidth: float) -> Decode:
        """Time decodes of `batch` sequences at the plan's context."""
        ahead = self._decode_steps(batch, self._runner)
        waiting = self._decode_steps(batch, _Waiting(self._runner))
        kv_bytes = batch * self._plan.context * self._kv_bytes_per_token
        return Decode(
            batch=batch,
            step_ms=ahead.step_ms,
            waiting_step_ms=waiting.step_ms,
            floor_ms=(self.weight_bytes + kv_bytes) / bandwidth * 1e3,
            scheduler_ms=waiting.scheduler_ms,
        )

    def prefill(self, length: int) -> float:
        """Return prompt tokens per second of one prompt, the better of two."""
        durations = []
        for attempt in range(2):
            engine = self._engine(self._runner, max_num_seqs=1)
            engine.add(self._request(attempt, length, max_tokens=1), "bench")
            _wait(self._device)
            started_at = time.perf_counter()
            while engine.has_work:
                engine.step()
            durations.append(time.perf_counter() - started_at)
        return length / min(durations)

    def _decode_steps(self, batch: int, runner: "AheadRunner | _Waiting") -> "_Steps":
        engine = self._engine(runner, max_num_seqs=batch)
        prompt = self._plan.context - _MARGIN_TOKENS
        for i in range(batch):
            engine.add(self._request(i, prompt, self._decode_len - prompt), "bench")
        while engine.scheduler.num_waiting or engine.counters.output_tokens < batch * _MARGIN_TOKENS:
            engine.step()
        scheduled_before, steps_before = engine.counters.scheduler_s, engine.counters.steps
        durations = []
        for _ in range(self._plan.num_steps):
            started_at = time.perf_counter()
            engine.step()
            durations.append(time.perf_counter() - started_at)
        scheduler_s = engine.counters.scheduler_s - scheduled_before
        num_steps = engine.counters.steps - steps_before
        while engine.has_work:
            engine.step()
        return _Steps(step_ms=statistics.median(durations) * 1e3, scheduler_ms=scheduler_s / num_steps * 1e3)

    def _engine(self, runner: "AheadRunner | _Waiting", max_num_seqs: int) -> Engine:
        config = ResolvedConfig(
            max_model_len=self._max_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(self._max_len, max_num_seqs),
            block_size=self._block_size,
            num_blocks=self.num_blocks,
            enable_prefix_caching=False,  # equal prompts must not share their K and V
        )
        return Engine(config, runner, vocab_size=self._model.vocab_size, eos_token_ids=frozenset())

    def _request(self, number: int, length: int, max_tokens: int) -> GenerateRequest:
        prompt = tuple((number + 7919 * i) % self._model.vocab_size for i in range(length))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return GenerateRequest(request_id=number, prompt_ids=prompt, sampling=sampling)

    def _kv_bytes(self) -> int:
        if self._device.type == "cpu":
            return _CPU_KV_BYTES
        return kv_budget(measure_memory(self._model, self._max_len, self._max_num_seqs), _UTILIZATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    step_ms: float
    scheduler_ms: float


class _Waiting:
    """A runner whose steps are not launched ahead."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def execute(self, step: Step) -> StepResult:
        return self._runner.execute(step)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
