"""EngineConfig: what a user may set, and resolve(): what the engine then runs with."""

from typing import Literal

import msgspec

from replicas.errors import ConfigError

Batching = Literal["continuous", "static", "static_live_rows"]
Numerics = Literal["exact", "fast"]
Quantization = Literal["none", "int8"]
Device = Literal["auto", "cpu", "cuda"]

DEFAULT_CPU_KV_FRACTION = 0.25
MAX_CPU_KV_BYTES = 2 << 30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine knobs under the field's usual names. None = decided by `resolve`."""

    model: str = "smollm2-135m-instruct"
    """A bundled model's name, a folder, a `.gguf` file, or a Hub id."""
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on CPU, the checkpoint's own type on CUDA."""
    attention: str = "auto"
    """Attention backend; `auto` takes the first that the hardware runs."""
    numerics: Numerics | None = None
    """`exact`: a row's bits do not depend on its batch (default on CPU). `fast` gives that up."""
    quantization: Quantization | None = None
    """`int8`: linear layers in 8 bits, CPU only: several times faster, answers differ a little. Default:
    where the CPU multiplies 8-bit numbers exactly and the model's layers can be calibrated, else `none`."""
    num_threads: int | None = None
    """CPU threads of the model; default: all cores this process may use."""

    max_model_len: int | None = None
    """Longest prompt + output in tokens; default: what the model was trained for, if it fits the pool."""
    max_num_seqs: int = 32
    """Seats: most sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    block_size: int | None = None
    """Tokens per KV block; default: what the attention backend likes (16 on CPU)."""
    kv_cache_memory: int | None = None
    """Bytes for the KV pool; default on CPU: a quarter of the free memory, at most 2 GiB."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV pool together (CUDA only)."""
    cuda_graphs: bool = True
    """Replay decodes from recorded graphs (CUDA only); off saves some memory and seconds of start-up."""
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    """Most tokens guessed per sequence and step from what its own text said before (prompt lookup), CPU only.
    Answers stay the same; repetitive ones come faster, others cost the wasted rows. 0 = off."""

    itl_target_ms: float | None = None
    """Inter-token latency that prefill chunks must not break; None = chunks are bounded by tokens only."""
    tier_itl_target_ms: dict[int, float] = {}
    """Per tier, where it differs from itl_target_ms."""
    aging_s: float = 30.0
    """A waiting sequence gains one tier per this many seconds."""

    batching: Batching = "continuous"
    """`static`: a batch is bound until its longest member ends, finished rows still computed;
    `static_live_rows`: bound likewise, finished rows left out. For comparison only."""
    chunked_prefill: bool = True
    preemption: bool = True
    """Off: a sequence is admitted only if its longest possible output fits; seats are never taken."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What sizing needs to know of a loaded model."""

    max_position_embeddings: int
    kv_bytes_per_token: int
    preferred_block_size: int


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A complete configuration: every number that scheduler, cache and runner use."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    itl_target_ms: float | None = None
    tier_itl_target_ms: dict[int, float] = {}
    aging_s: float = 30.0
    batching: Batching = "continuous"
    chunked_prefill: bool = True
    preemption: bool = True

    @property
    def has_itl_target(self) -> bool:
        return self.itl_target_ms is not None or bool(self.tier_itl_target_ms)

    @property
    def takes_seats(self) -> bool:
        """Whether a better tier may take seats and blocks from running sequences of a worse one."""
        return self.preemption and self.batching == "continuous"


def resolve(config: EngineConfig, shape: ModelShape, kv_bytes: int) -> ResolvedConfig:
    """Complete `config` for a model of this shape and `kv_bytes` of memory for its KV pool.

    Raises ConfigError with the field, its value and the limit it breaks.
    """
    _check_ranges(config)
    block_size = config.block_size or shape.preferred_block_size
    num_blocks = kv_bytes // (block_size * shape.kv_bytes_per_token)
    pool_tokens = num_blocks * block_size
    max_model_len = config.max_model_len or max(2, min(shape.max_position_embeddings, pool_tokens))
    if max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's "
            f"{shape.max_position_embeddings} positions"
        )
    if pool_tokens < max_model_len:
        needed = -(-max_model_len // block_size) * block_size * shape.kv_bytes_per_token
        raise ConfigError(
            f"the KV pool of {kv_bytes / 2**20:.0f} MiB holds {pool_tokens} tokens, fewer than one sequence "
            f"of max_model_len {max_model_len}; set kv_cache_memory >= {needed} or a smaller max_model_len"
        )
    if not config.chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked_prefill a whole prompt must fit into one step: max_num_batched_tokens "
            f"{config.max_num_batched_tokens} is less than max_model_len {max_model_len}"
        )
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        num_speculative_tokens=config.num_speculative_tokens,
        itl_target_ms=config.itl_target_ms,
        tier_itl_target_ms=config.tier_itl_target_ms,
        aging_s=config.aging_s,
        batching=config.batching,
        chunked_prefill=config.chunked_prefill,
        preemption=config.preemption,
    )


def _check_ranges(config: EngineConfig) -> None:
    at_least_one = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "num_threads")
    if config.max_model_len == 1:
        raise ConfigError("max_model_len must be at least 2: one token of prompt, one of output")
    for name in at_least_one:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if config.num_speculative_tokens < 0:
        raise ConfigError(f"num_speculative_tokens must be at least 0, not {config.num_speculative_tokens}")
    if config.num_speculative_tokens and config.batching != "continuous":
        raise ConfigError(f"num_speculative_tokens: not with batching {config.batching}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs "
            f"{config.max_num_seqs}: a step could not give every running sequence its token"
        )
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {config.gpu_memory_utilization}")
    targets = {"itl_target_ms": config.itl_target_ms, "aging_s": config.aging_s}
    targets |= {f"tier_itl_target_ms[{tier}]": ms for tier, ms in config.tier_itl_target_ms.items()}
    for name, target in targets.items():
        if target is not None and not target > 0:
            raise ConfigError(f"{name} must be positive, not {target}")
