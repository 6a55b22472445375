import pytest

from replicas.config import EngineConfig, ModelShape, resolve
from replicas.errors import ConfigError

SHAPE = ModelShape(max_position_embeddings=8192, kv_bytes_per_token=1000, preferred_block_size=16)


def test_defaults_are_completed_from_model_and_memory() -> None:
    resolved = resolve(EngineConfig(), SHAPE, kv_bytes=160_000_000)
    assert (resolved.block_size, resolved.num_blocks, resolved.max_model_len) == (16, 10_000, 8192)


def test_a_small_pool_shortens_the_default_context() -> None:
    assert resolve(EngineConfig(), SHAPE, kv_bytes=1_000_000).max_model_len == 992


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 9000}, "max_model_len 9000 is more than the model's 8192 positions"),
        ({"max_model_len": 4096}, "the KV pool of 1 MiB holds 992 tokens, fewer than one sequence"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "max_num_batched_tokens 32 is less than max_num_seqs",
        ),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], not 1.5"),
        ({"itl_target_ms": -3.0}, "itl_target_ms must be positive, not -3.0"),
        ({"tier_itl_target_ms": {1: 0.0}}, r"tier_itl_target_ms\[1\] must be positive"),
        ({"aging_s": float("nan")}, "aging_s must be positive"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 512}, "without chunked_prefill a whole prompt"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"block_size": 2048}, "fewer than one sequence"),
    ],
)
def test_what_cannot_work_is_refused_with_its_number(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**changes), SHAPE, kv_bytes=1_000_000)  # type: ignore[arg-type]
