import numpy as np
import pytest

from replicas.api import GenerateRequest, SamplingParams
from replicas.packing import pack
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence


def entry(tokens: list[int], start: int, count: int, blocks: list[int]) -> ScheduledSequence:
    sequence = Sequence(
        seq_id=0,
        owner="",
        request=GenerateRequest(request_id=0, prompt_ids=(1,), sampling=SamplingParams(max_tokens=1)),
        index=0,
        arrival_at=0.0,
        token_ids=tokens,
        num_prompt_tokens=1,
        stop_ids=frozenset(),
        max_num_tokens=100,
        block_table=blocks,
    )
    return ScheduledSequence(sequence, start, count, start + count == len(tokens))


STEP = [
    entry([10, 11, 12, 13, 14, 15], 5, 1, [7, 3]),  # decode
    entry(list(range(20, 31)), 2, 5, [2, 9, 4]),  # chunk inside a prompt
    entry([40, 41, 42], 0, 3, [5, 6]),  # whole prompt; one block more than needed
]


def test_rows_are_packed_without_gaps() -> None:
    packed = pack(STEP, block_size=4, min_rows=1)
    assert packed.token_ids.tolist() == [15, 22, 23, 24, 25, 26, 40, 41, 42]
    assert packed.positions.tolist() == [5, 2, 3, 4, 5, 6, 0, 1, 2]
    assert packed.batch.query_start_loc.tolist() == [0, 1, 6, 9]
    assert packed.batch.seq_lens.tolist() == [6, 7, 3]
    assert packed.batch.num_rows == 9


def test_slots_follow_the_block_tables() -> None:
    batch = pack(STEP, block_size=4, min_rows=1).batch
    assert batch.slot_mapping.tolist() == [13, 10, 11, 36, 37, 38, 20, 21, 22]
    assert batch.block_tables.tolist() == [[7, 3], [2, 9], [5, 0]]
    assert batch.block_tables.dtype == batch.slot_mapping.dtype == np.int32


def test_only_last_known_tokens_sample() -> None:
    assert pack(STEP, block_size=4, min_rows=1).sample_rows.tolist() == [0, 8]


@pytest.mark.parametrize(("min_rows", "rows"), [(1, 9), (9, 9), (12, 12)])
def test_padding_fills_up_to_min_rows(min_rows: int, rows: int) -> None:
    packed = pack(STEP, block_size=4, min_rows=min_rows)
    assert packed.token_ids.shape == packed.positions.shape == (rows,)
    assert not packed.token_ids[9:].any()
    assert not packed.positions[9:].any()
    assert len(packed.batch.slot_mapping) == 9
