"""TorchRunner: executes steps on a loaded model."""

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from replicas.api import SamplingParams, TokenLogprobs
from replicas.attention.base import AttentionBackend
from replicas.errors import ConstraintError
from replicas.model import LoadedModel
from replicas.packing import LongArray, PackedStep, pack
from replicas.runner_drafts import judge, sampled_positions
from replicas.sampling import Masks, Sampled, sample, token_logprobs
from replicas.step import ScheduledSequence, Step, StepResult

if TYPE_CHECKING:
    from replicas.constraints import Constraints  # llguidance: not on a machine that only checks its GPU

NO_ROWS: Final = np.zeros(0, dtype=np.int64)


class WholePass(Protocol):
    """Computes what a model does, by another way (model_pass.py)."""

    def logits(
        self,
        packed: PackedStep,  # with which the backend's step has begun
        keep: LongArray,  # [n]; rows whose logits are wanted
    ) -> Tensor: ...  # [n, vocab_size] float32


class TorchRunner:
    """Packs a step, runs the model over it, samples.

    `constraints` None: requests with a grammar fail. `row_floor` is the least number of rows of any pass
    (exact numerics, model_exact.py); 1 = no padding. `whole_pass` computes in the model's place.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        constraints: "Constraints | None",
        *,
        block_size: int,
        row_floor: int = 1,
        whole_pass: WholePass | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._constraints = constraints
        self._block_size = block_size
        self._row_floor = row_floor
        self._whole_pass = whole_pass

    @property
    def module(self) -> nn.Module:
        """The model as it runs."""
        return self._model.module

    @property
    def backend(self) -> AttentionBackend:
        return self._backend

    def prepare(self, sampling: SamplingParams) -> None:
        """Begin with what a request needs and takes time; returns at once."""
        if sampling.grammar and self._constraints is not None:
            self._constraints.prepare(sampling.grammar)

    def execute(self, step: Step) -> StepResult:
        entries = step.sequences
        packed = pack(entries, self._block_size, self._row_floor)
        errors = self._replace_foreign_tokens(packed)
        logits = self._forward(packed, prompt_rows(entries, packed))
        masks, astray = self._masks(entries)
        num_rows = len(packed.sample_rows)
        judged = judge(entries, sample(logits[:num_rows], sampled_positions(entries), masks))
        result = step_result(entries, judged.sampled, errors | astray, logits[num_rows:])
        result.verified = {i: entry for i, entry in judged.verified.items() if i not in result.errors}
        return result

    def _masks(self, entries: Rows[ScheduledSequence]) -> tuple[Masks, dict[int, str]]:
        """Return the tokens that grammars allow, by sampled row, and the errors of entries whose grammar
        cannot be followed."""
        masks: dict[int, NDArray[np.bool_]] = {}
        errors: dict[int, str] = {}
        row = 0
        for i, entry in enumerate(entries):
            if not entry.samples:
                continue
            if entry.sequence.sampling.grammar:
                try:
                    masks |= dict(enumerate(self._allowed(entry), row))
                except ConstraintError as error:
                    errors[i] = str(error)
            row += 1 + len(entry.drafts)
        return masks, errors

    def _allowed(self, entry: ScheduledSequence) -> list[NDArray[np.bool_]]:
        if self._constraints is None:
            raise ConstraintError("grammars cannot be followed here")
        return self._constraints.allowed_after(entry.sequence, entry.drafts)

    def logits(self, entries: Rows[ScheduledSequence]) -> Tensor:
        """Compute the scheduled tokens; return [entries that sample, vocab_size] float32."""
        return self._forward(pack(entries, self._block_size, self._row_floor))

    def logit_bytes(self, entries: Rows[ScheduledSequence]) -> bytes:
        """Compute the scheduled tokens; return the bits of the last sampled entry's logits, if any."""
        return self.logits(entries)[-1:].cpu().numpy().tobytes()

    def _rows_to_keep(self, packed: PackedStep, prompt_rows: LongArray) -> LongArray:
        """Return the rows that sample, then `prompt_rows`, then repetitions of the first up to the floor."""
        keep = np.concatenate([packed.sample_rows, prompt_rows])
        if 0 < len(keep) < self._row_floor:  # the head is a linear layer too
            keep = np.concatenate([keep, np.repeat(keep[:1], self._row_floor - len(keep))])
        return keep

    def _forward(self, packed: PackedStep, prompt_rows: LongArray = NO_ROWS) -> Tensor:
        """Return the logits of the rows that sample, then those of `prompt_rows`."""
        device = self._model.device
        num_kept = len(packed.sample_rows) + len(prompt_rows)
        keep = self._rows_to_keep(packed, prompt_rows)
        with torch.inference_mode():
            self._backend.begin_step(packed.batch)
            if self._whole_pass is not None:
                return self._whole_pass.logits(packed, keep)[:num_kept]
            logits = self._model.logits(
                torch.from_numpy(packed.token_ids).to(device),
                torch.from_numpy(packed.positions).to(device),
                torch.from_numpy(keep).to(device),
                self._attend,
            )
        return logits[:num_kept]

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


def step_result(
    entries: Rows[ScheduledSequence],
    sampled: Sampled,  # rows parallel to the entries that sample
    errors: dict[int, str],  # by position in `entries`
    prompt_logits: Tensor,  # [rows of prompt_rows, vocab_size] float32
) -> StepResult:
    """Spread what was sampled over the step's sequences."""
    sampling = [i for i, entry in enumerate(entries) if entry.samples]
    errors = {sampling[row]: message for row, message in sampled.errors.items()} | errors
    result = StepResult(
        token_ids=[None] * len(entries),
        errors=errors,
        prompt_logprobs=_prompt_logprobs(entries, prompt_logits) if len(prompt_logits) else {},
    )
    if sampled.logprobs is not None:
        result.logprobs = [None] * len(entries)
    for row, i in enumerate(sampling):
        if i in errors:
            continue
        result.token_ids[i] = sampled.token_ids[row]
        if result.logprobs is not None and sampled.logprobs is not None:
            result.logprobs[i] = sampled.logprobs[row]
    return result


def prompt_rows(entries: Rows[ScheduledSequence], packed: PackedStep) -> LongArray:
    """Packed rows at which the logprob of the next prompt token is wanted, in order of the sequences."""
    parts = [NO_ROWS]
    for entry, first_row in zip(entries, packed.batch.query_start_loc, strict=False):
        positions = entry.sequence.prompt_rows(entry.start, entry.num_new_tokens)
        if positions:
            parts.append(np.array(positions, dtype=np.int64) - entry.start + int(first_row))
    return np.concatenate(parts)


def _prompt_logprobs(
    entries: Rows[ScheduledSequence],
    logits: Tensor,  # [rows of prompt_rows, vocab_size] float32
) -> dict[int, list[TokenLogprobs]]:
    rows = iter(logits)
    found: dict[int, list[TokenLogprobs]] = {}
    for i, entry in enumerate(entries):
        sequence = entry.sequence
        positions = sequence.prompt_rows(entry.start, entry.num_new_tokens)
        count = sequence.sampling.prompt_logprobs or 0
        if positions:
            found[i] = [
                token_logprobs(next(rows), sequence.token_ids[position + 1], count) for position in positions
            ]
    return found
