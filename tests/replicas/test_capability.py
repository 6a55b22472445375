import pytest

from replicas.capability import Capability, capability
from replicas.config import ResolvedConfig
from replicas.step_time import StepShape, StepTimeModel


def config(**changes: object) -> ResolvedConfig:
    sizes: dict[str, object] = {
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "num_blocks": 4096,
    }
    return ResolvedConfig(**(sizes | changes))  # type: ignore[arg-type]


def learned() -> StepTimeModel:
    """A step of 10 ms, and one more per sequence and per 100 prompt tokens."""
    model = StepTimeModel()
    for number in (1, 2, 4, 8, 16, 32, 64) * 20:
        shape = StepShape(num_new_tokens=number, kv_read_tokens=number * 100, num_sampling=number)
        model.observe(shape, 0.010 + 0.001 * number)
        model.observe(StepShape().with_prefill(8 * number, 0), 0.010 + 0.0008 * number)
    return model


def test_nothing_is_known_before_the_first_fit() -> None:
    assert capability(config(), StepTimeModel(), 100) == Capability()


def test_speeds_are_those_of_the_step_time() -> None:
    able = capability(config(), learned(), 100)
    assert able.max_batch == 64
    assert able.step_s == pytest.approx(0.011, rel=0.1)
    assert able.output_tokens_per_s == pytest.approx(64 / 0.074, rel=0.1)
    assert able.input_tokens_per_s == pytest.approx(512 / 0.0612, rel=0.15)


def test_the_batch_is_bound_by_the_strictest_target() -> None:
    able = capability(config(itl_target_ms=90.0, tier_itl_target_ms={1: 30.0}), learned(), 100)
    assert 12 <= able.max_batch <= 21  # 30 ms are 20 sequences, less what predictions are off by
    assert capability(config(itl_target_ms=5.0), learned(), 100).max_batch == 1


def test_the_batch_is_bound_by_the_pool() -> None:
    assert capability(config(num_blocks=100), learned(), 100).max_batch == 16
