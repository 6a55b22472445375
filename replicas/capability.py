"""Capability: how much work one replica can take, read off what its engine has learned. Pure."""

from dataclasses import dataclass
from typing import Final

from replicas.config import ResolvedConfig
from replicas.prefill_budget import step_limit_s
from replicas.step_time import StepShape, StepTimeModel

MEAN_CONTEXT: Final = 512
"""Tokens of a sequence, as long as nothing is known of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """All 0 until the step time is known."""

    input_tokens_per_s: float = 0.0
    """Prompts in the largest chunks, with nothing else running."""
    output_tokens_per_s: float = 0.0
    """Decoding `max_batch` sequences."""
    max_batch: int = 0
    """Most sequences that decode within the strictest ITL target and have seats and blocks; at least 1."""
    step_s: float = 0.0
    """A decode step of one sequence alone."""


def capability(config: ResolvedConfig, step_time: StepTimeModel, mean_context: float) -> Capability:
    """Return what a replica can do with sequences of so many tokens. O(log seats) predictions."""
    if not step_time.fitted:
        return Capability()
    context = round(mean_context) or MEAN_CONTEXT
    most = min(config.max_num_seqs, config.num_blocks * config.block_size // context)
    max_batch = _largest_batch(step_time, context, _strictest_s(config, step_time), max(1, most))
    chunk = config.max_num_batched_tokens
    prefill_s = step_time.predict(StepShape().with_prefill(chunk, 0))
    decode_s = step_time.predict(_decodes(max_batch, context))
    return Capability(
        input_tokens_per_s=chunk / prefill_s if prefill_s else 0.0,
        output_tokens_per_s=max_batch / decode_s if decode_s else 0.0,
        max_batch=max_batch,
        step_s=step_time.predict(_decodes(1, context)),
    )


def _strictest_s(config: ResolvedConfig, step_time: StepTimeModel) -> float | None:
    targets_ms = [*config.tier_itl_target_ms.values(), config.itl_target_ms]
    given = [target_ms for target_ms in targets_ms if target_ms is not None]
    return step_limit_s(min(given), step_time) if given else None


def _largest_batch(step_time: StepTimeModel, context: int, limit_s: float | None, most: int) -> int:
    if limit_s is None or step_time.predict(_decodes(most, context)) <= limit_s:
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        if step_time.predict(_decodes(middle, context)) <= limit_s:
            low = middle
        else:
            high = middle
    return low


def _decodes(number: int, context: int) -> StepShape:
    return StepShape(num_new_tokens=number, kv_read_tokens=number * context, num_sampling=number)
