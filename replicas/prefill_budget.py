"""PrefillBudget: how many prompt tokens may still join the step under construction."""

from typing import Final

from replicas.config import ResolvedConfig
from replicas.step import Step
from replicas.step_time import StepTimeModel

FLOOR_TOKENS: Final = 8
"""A step with waiting prompts computes at least this many of their tokens, so that they move."""
COLD_TOKENS: Final = 64
"""The chunk under an ITL target while no step time is known yet."""


class PrefillBudget:
    """One step's room for prefill: the token budget, and the ITL target of the strictest decode.

    Without decodes in the step nobody waits for it, so only the token budget counts.
    """

    def __init__(self, config: ResolvedConfig, step_time: StepTimeModel, step: Step) -> None:
        self.left = config.max_num_batched_tokens - step.num_tokens
        self.at_floor = False
        self._chunked = config.chunked_prefill
        self._step_time = step_time
        self._step = step
        self._taken = 0
        self._limit_s = None
        if self._chunked and step.num_decodes and (target_ms := _strictest_target_ms(config, step)):
            self._limit_s = step_limit_s(target_ms, step_time) / step_time.pace

    def could_take(self, num_tokens: int) -> bool:
        """Whether a sequence with so many tokens to compute can get any of them into this step."""
        return self.left > 0 if self._chunked else num_tokens <= self.left

    def take(self, wanted: int, context: int) -> int:
        """Tokens granted to a prefill with `context` computed tokens; 0 <= result <= wanted."""
        if not self._chunked:
            granted = wanted if wanted <= self.left else 0
        else:
            granted = self._within_itl(min(wanted, self.left), context)
        self._taken += granted
        self.left -= granted
        if granted < wanted:
            self.left = 0
        return granted

    def _within_itl(self, limit: int, context: int) -> int:
        if self._limit_s is None or limit <= 0:
            return limit
        if not self._step_time.fitted:
            return min(limit, max(0, COLD_TOKENS - self._taken))
        granted = self._step_time.largest_chunk(self._step.shape, context, self._limit_s, limit)
        floor = min(limit, FLOOR_TOKENS - self._taken)
        if granted < floor:
            self.at_floor = True
            granted = floor
        return granted


def step_limit_s(target_ms: float, step_time: StepTimeModel) -> float:
    """How long a step may be predicted to take, for its gap to stay within an ITL target."""
    return target_ms / 1e3 / step_time.overrun


def _strictest_target_ms(config: ResolvedConfig, step: Step) -> float | None:
    if not config.has_itl_target:
        return None
    tiers = {entry.sequence.tier for entry in step.sequences[: step.num_decodes]}
    targets = [config.tier_itl_target_ms.get(tier, config.itl_target_ms) for tier in tiers]
    return min((target for target in targets if target is not None), default=None)
