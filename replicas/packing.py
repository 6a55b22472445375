"""From a Step to the flat arrays of one forward pass. NumPy only; nothing here knows the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replicas.step import ScheduledSequence

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where the rows of one step live in the KV pool. The same for all layers.

    Rows of all sequences are packed along one axis without gaps:

        row      0 1 2 3 4 5 6 7 8 ...
        sequence A A A A B C C C .        query_start_loc = [0, 4, 5, 8]
                                 `- padding: stored nowhere, attends to nothing, gives zeros
    """

    query_start_loc: IntArray  # [num_seqs + 1]; first row of each sequence
    seq_lens: IntArray  # [num_seqs]; tokens of each sequence up to and including its new rows
    block_tables: IntArray  # [num_seqs, max_blocks]; unused entries are 0 and must not be followed
    slot_mapping: IntArray  # [num_rows]; block * block_size + offset of each row's token

    @property
    def num_rows(self) -> int:
        """Rows without padding."""
        return len(self.slot_mapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """One forward pass: a row per token to compute, then padding."""

    token_ids: LongArray  # [rows]; padding is token 0
    positions: LongArray  # [rows]; within the sequence; padding is 0
    sample_rows: LongArray  # [num_samples]; rows whose successor is sampled, in order of the positions
    batch: AttentionBatch


def pack(sequences: Sequence[ScheduledSequence], block_size: int, min_rows: int) -> PackedStep:
    """Lay out the scheduled tokens, padded to at least `min_rows` rows.

    Cost: O(tokens + sequences * blocks), a few hundred nanoseconds per sequence that decodes.
    """
    starts = np.array([entry.start for entry in sequences], dtype=np.int64)
    lengths = np.array([entry.num_new_tokens for entry in sequences], dtype=np.int64)
    ends = starts + lengths
    query_start_loc = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_rows = int(query_start_loc[-1])
    rows = max(num_rows, min_rows)

    token_ids = np.zeros(rows, dtype=np.int64)
    token_ids[:num_rows] = _gather_tokens(sequences)
    positions = np.zeros(rows, dtype=np.int64)
    positions[:num_rows] = np.arange(num_rows) + np.repeat(starts - query_start_loc[:-1], lengths)

    tables = _block_tables(sequences, -(-ends // block_size))
    row_block, offset = np.divmod(positions[:num_rows], block_size)
    slots = tables[np.repeat(np.arange(len(sequences)), lengths), row_block] * block_size + offset
    samples = np.array([1 + len(entry.drafts) if entry.samples else 0 for entry in sequences], dtype=np.int64)
    return PackedStep(
        token_ids=token_ids,
        positions=positions,
        sample_rows=_last_rows(query_start_loc[1:], samples),
        batch=AttentionBatch(
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            block_tables=tables,
            slot_mapping=slots.astype(np.int32),
        ),
    )


def _last_rows(ends: LongArray, counts: LongArray) -> LongArray:
    """Return the last counts[i] rows before each ends[i]."""
    behind = np.cumsum(counts)
    return np.arange(behind[-1] if len(behind) else 0) + np.repeat(ends - behind, counts)


def _gather_tokens(sequences: Sequence[ScheduledSequence]) -> list[int]:
    tokens: list[int] = []
    for entry in sequences:
        if entry.num_new_tokens == 1:
            ids = entry.sequence.token_ids
            # Launched ahead of the step that samples it, a sequence's last token is not known yet.
            tokens.append(ids[entry.start] if entry.start < len(ids) else 0)
        else:
            end = entry.start + entry.num_new_tokens - len(entry.drafts)
            tokens.extend(entry.sequence.token_ids[entry.start : end])
            tokens.extend(entry.drafts)
    return tokens


def _block_tables(sequences: Sequence[ScheduledSequence], counts: LongArray) -> IntArray:
    tables = np.zeros((len(sequences), int(counts.max(initial=1))), dtype=np.int32)
    for i, entry in enumerate(sequences):
        count = int(counts[i])
        tables[i, :count] = entry.sequence.block_table[:count]
    return tables
