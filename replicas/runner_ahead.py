"""AheadRunner: a TorchRunner that launches a step and returns; tokens reach the next step on the device."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, GraphableAttention
from replicas.attention.staging import Staging
from replicas.cuda_graphs import DecodeGraphs, Recorder
from replicas.model import LoadedModel
from replicas.overlap import Launched, Launcher
from replicas.packing import LongArray, PackedStep, pack
from replicas.runner import TorchRunner, prompt_rows, step_result
from replicas.sampling_batched import Drawn, draw, read
from replicas.step import ScheduledSequence, Step, StepResult

if TYPE_CHECKING:
    from replicas.constraints import Constraints


@dataclass(slots=True, kw_only=True)
class LaunchedStep(Launched):
    """A step on the device, its report on the way to pinned memory."""

    entries: Rows[ScheduledSequence]
    drawn: Drawn
    report: Tensor  # drawn.report, on the host once `arrived`
    arrived: torch.cuda.Event | None
    """None on CPU, where nothing is under way."""
    prompt_logits: Tensor
    errors: dict[int, str]

    def rows_by_sequence(self) -> dict[int, int]:
        """Sequence id -> row of its token in `drawn`."""
        sampling = [entry.sequence.seq_id for entry in self.entries if entry.samples]
        return {seq_id: row for row, seq_id in enumerate(sampling)}

    def result(self) -> StepResult:
        if self.arrived is not None:
            self.arrived.synchronize()
        sampling = [entry.sequence for entry in self.entries if entry.samples]
        sampled = read(self.drawn, self.report.numpy(), sampling)
        return step_result(self.entries, sampled, self.errors, self.prompt_logits)


class AheadRunner(TorchRunner, Launcher):
    """Executes steps without waiting for the device, decodes by CUDA graphs where they were recorded."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        constraints: "Constraints | None",
        *,
        block_size: int,
        row_floor: int = 1,
    ) -> None:
        super().__init__(model, backend, constraints, block_size=block_size, row_floor=row_floor)
        self._staging = Staging(model.device)
        self._graphs: DecodeGraphs | None = None

    def record_graphs(self, recorder: Recorder, max_num_seqs: int, max_model_len: int) -> None:
        """Record the forward pass of decodes. Raises RuntimeError where the model cannot be recorded."""
        backend = self._backend
        assert isinstance(backend, GraphableAttention), f"{backend.name} launches differently every time"
        graphs = DecodeGraphs(
            self._model,
            backend,
            self._attend,
            max_num_seqs=max_num_seqs,
            max_blocks=-(-max_model_len // self._block_size),
        )
        graphs.record(recorder)
        self._graphs = graphs

    def execute(self, step: Step) -> StepResult:
        return self.launch(step, None).result()

    def launch(self, step: Step, previous: Launched | None) -> LaunchedStep:
        entries = step.sequences
        packed = pack(entries, self._block_size, self._row_floor)
        errors = self._replace_foreign_tokens(packed)
        sampling = [i for i, entry in enumerate(entries) if entry.samples]
        sequences = [entries[i].sequence for i in sampling]
        masks, astray = self._masks(entries)
        errors |= astray
        with torch.inference_mode():
            logits = self._launch_forward(entries, packed, previous)
            num_tokens = [entries[i].start + entries[i].num_new_tokens for i in sampling]
            drawn = draw(logits[: len(sampling)], sequences, num_tokens, masks, self._staging)
            report, arrived = self._send_back(drawn.report)
        return LaunchedStep(
            entries=entries,
            drawn=drawn,
            report=report,
            arrived=arrived,
            prompt_logits=logits[len(sampling) :],
            errors=errors,
        )

    def _launch_forward(
        self, entries: Rows[ScheduledSequence], packed: PackedStep, previous: Launched | None
    ) -> Tensor:
        """Return the logits of the rows that sample, then those of prompt rows."""
        asked = prompt_rows(entries, packed)
        num_kept = len(packed.sample_rows) + len(asked)
        keep = self._rows_to_keep(packed, asked)
        arrays = [packed.token_ids, packed.positions, keep, _rows_before(entries, previous)]
        token_ids, positions, keep_rows, rows_before = self._staging.upload(arrays)
        if previous is not None:
            assert isinstance(previous, LaunchedStep)
            token_ids[: len(entries)] = previous.drawn.token_ids[rows_before]
        if self._graphs is not None and _only_decodes(packed):
            return self._graphs.run(packed.batch, token_ids, positions)
        self._backend.begin_step(packed.batch)
        return self._model.logits(token_ids, positions, keep_rows, self._attend)[:num_kept]

    def _send_back(self, report: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if not report.is_cuda:
            return report, None
        host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        host.copy_(report, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return host, arrived


def _rows_before(entries: Rows[ScheduledSequence], previous: Launched | None) -> LongArray:
    """Return each entry's row among the tokens of the step before; empty when it needs none."""
    if previous is None:
        return np.zeros(0, dtype=np.int64)
    assert isinstance(previous, LaunchedStep)
    rows = previous.rows_by_sequence()
    return np.array([rows[entry.sequence.seq_id] for entry in entries], dtype=np.int64)


def _only_decodes(packed: PackedStep) -> bool:
    """Whether every sequence has one row, and samples."""
    return len(packed.sample_rows) == packed.batch.num_rows == len(packed.token_ids)
