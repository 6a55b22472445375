"""NullRunner: a runner without a model, to measure everything around one."""

import time
from typing import Final

from replicas.step import Step, StepResult

FIRST_TOKEN_ID: Final = 1000
NUM_TOKEN_IDS: Final = 1000
"""Tokens walk through a stretch of the vocabulary that holds ordinary words in BPE vocabularies."""


class NullRunner:
    """Every step takes `step_s` seconds, spent asleep as on a GPU, and never says an end token.

    The token at a position depends on the position alone, so a stream can be checked.
    """

    def __init__(self, step_s: float, vocab_size: int) -> None:
        self._step_s = step_s
        self._first = min(FIRST_TOKEN_ID, vocab_size // 2)
        self._count = min(NUM_TOKEN_IDS, vocab_size - self._first)

    def execute(self, step: Step) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        return StepResult(
            token_ids=[
                self._first + (entry.start + entry.num_new_tokens) % self._count if entry.samples else None
                for entry in step.sequences
            ]
        )
