"""A fixed prompt, computed in several arrangements: warms a runner up and proves its numerics."""

from collections.abc import Callable
from typing import Final

from replicas.api import GenerateRequest, SamplingParams
from replicas.config import ResolvedConfig
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence

_LENGTH: Final = 33
_NUM_SEQUENCES: Final = 3

Compute = Callable[[list[ScheduledSequence]], bytes]
"""Computes the scheduled tokens and returns the bits of the last entry's logits."""


def probe(compute: Compute, config: ResolvedConfig, vocab_size: int) -> list[bytes]:
    """Return the logits of one prompt once per arrangement: all equal if the numerics are exact.

    The arrangements: whole prompt alone; its last token as a decode; in chunks; as a decode among prompts.
    Leaves finite values in KV blocks that hold nothing of value.
    """
    subject, *others = _sequences(config, vocab_size)
    length = subject.num_tokens
    whole = _chunk(subject, 0, length)
    last = _chunk(subject, length - 1, length)
    results = [compute([whole]), compute([last])]
    middle = length // 3
    compute([_chunk(subject, 0, middle)])
    results.append(compute([_chunk(subject, middle, length)]))
    crowd = [_chunk(other, 0, other.num_tokens - i) for i, other in enumerate(others)]
    results.append(compute([*crowd, last]))
    return results


def _chunk(sequence: Sequence, start: int, end: int) -> ScheduledSequence:
    return ScheduledSequence(sequence, start, end - start, end == sequence.num_tokens)


def _sequences(config: ResolvedConfig, vocab_size: int) -> list[Sequence]:
    count = min(_NUM_SEQUENCES, config.num_blocks, config.max_num_seqs)
    blocks_each = config.num_blocks // count
    # A third of the step's tokens, so that all of them fit into one.
    length = min(_LENGTH, config.max_model_len, blocks_each * config.block_size)
    length = max(1, min(length, config.max_num_batched_tokens // count))
    return [_sequence(i, length, blocks_each, vocab_size) for i in range(count)]


def _sequence(number: int, length: int, num_blocks: int, vocab_size: int) -> Sequence:
    token_ids = [(1 + number + 7919 * i) % vocab_size for i in range(length)]
    return Sequence(
        seq_id=number,
        owner="",
        request=GenerateRequest(
            request_id=number, prompt_ids=tuple(token_ids), sampling=SamplingParams(max_tokens=1)
        ),
        index=0,
        arrival_at=0.0,
        token_ids=token_ids,
        num_prompt_tokens=length,
        stop_ids=frozenset(),
        max_num_tokens=length + 1,
        block_table=list(range(number * num_blocks, (number + 1) * num_blocks)),
    )
