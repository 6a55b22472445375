"""TorchRunner: executes steps on a loaded model."""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend
from replicas.model import LoadedModel
from replicas.packing import PackedStep, pack
from replicas.sampling import sample
from replicas.step import ScheduledSequence, Step, StepResult


class TorchRunner:
    """Packs a step, runs the model over it, samples.

    `row_floor` is the least number of rows of any pass (exact numerics, model_exact.py); 1 = no padding.
    """

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend, *, block_size: int, row_floor: int = 1
    ) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._row_floor = row_floor

    @property
    def backend(self) -> AttentionBackend:
        return self._backend

    def execute(self, step: Step) -> StepResult:
        entries = step.sequences
        packed = pack(entries, self._block_size, self._row_floor)
        errors = self._replace_foreign_tokens(packed)
        sampling = [i for i, entry in enumerate(entries) if entry.samples]
        sampled = sample(self._forward(packed), [entries[i].sequence for i in sampling])
        errors |= {sampling[i]: message for i, message in sampled.errors.items()}

        result = StepResult(token_ids=[None] * len(entries), errors=errors)
        if sampled.logprobs is not None:
            result.logprobs = [None] * len(entries)
        for row, i in enumerate(sampling):
            if i in errors:
                continue
            result.token_ids[i] = sampled.token_ids[row]
            if result.logprobs is not None and sampled.logprobs is not None:
                result.logprobs[i] = sampled.logprobs[row]
        return result

    def logits(self, entries: Rows[ScheduledSequence]) -> Tensor:
        """Compute the scheduled tokens; return [entries that sample, vocab_size] float32."""
        return self._forward(pack(entries, self._block_size, self._row_floor))

    def logit_bytes(self, entries: Rows[ScheduledSequence]) -> bytes:
        """Compute the scheduled tokens; return the bits of the last sampled entry's logits, if any."""
        return self.logits(entries)[-1:].cpu().numpy().tobytes()

    def _forward(self, packed: PackedStep) -> Tensor:
        device = self._model.device
        num_samples = len(packed.sample_rows)
        keep = packed.sample_rows
        if 0 < num_samples < self._row_floor:  # the head is a linear layer too
            keep = np.concatenate([keep, np.repeat(keep[:1], self._row_floor - num_samples)])
        with torch.inference_mode():
            self._backend.begin_step(packed.batch)
            logits = self._model.logits(
                torch.from_numpy(packed.token_ids).to(device),
                torch.from_numpy(packed.positions).to(device),
                torch.from_numpy(keep).to(device),
                self._attend,
            )
        return logits[:num_samples]

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,  # noqa: ARG002 - the observed one also covers classes that slide by mask
        softcap: float | None,
    ) -> Tensor:
        self._backend.store(layer, key, value)
        return self._backend.attend(layer, query, scaling, self._model.needs.windows[layer], softcap)

    def _replace_foreign_tokens(self, packed: PackedStep) -> dict[int, str]:
        """Put token 0 in place of ids the model does not have: one bad sequence must fail alone."""
        ids = packed.token_ids
        foreign = (ids < 0) | (ids >= self._model.vocab_size)
        if not foreign.any():
            return {}
        rows = np.flatnonzero(foreign)
        entries = np.searchsorted(packed.batch.query_start_loc, rows, side="right") - 1
        message = f"token id {ids[rows[0]]} is not in the vocabulary of {self._model.vocab_size}"
        ids[foreign] = 0
        return {int(entry): message for entry in entries}
