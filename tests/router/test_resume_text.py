"""What looks at an output's text or draws its tokens, when the replica is lost in the middle of it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher

from replicas.api import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from replicas.constraints import Constraints
from replicas.sequence import Sequence
from router.answering import Answer, PromptRun
from router.output import OutputOptions, OutputText
from router.protocol import CompletionBody
from router.sampling import sampling_params
from router.text import TextCodec
from tests.router.fake_transport import STEP_S, serving
from tests.router.test_backend import in_virtual_time
from tests.router.tiny_tokenizers import byte_level_folder
from tests.wire_world import FakeEngine

EOS = 2
VOCAB_SIZE = 300
SCHEMA = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Perth"]}, "age": {"type": "integer", "maximum": 999}},
        "required": ["city", "age"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)

Say = Callable[[Sequence], int]
"""The token that comes after a sequence."""


class SayingEngine(FakeEngine):
    """Says what it is told; knows of a resumed output what the request carries, and nothing else."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say
        self._sequences: dict[tuple[int, int, int], Sequence] = {}

    def _make_delta(self, request: GenerateRequest, index: int, position: int) -> TokenDelta:
        key = (request.request_id, request.attempt, index)
        sequence = self._sequences.get(key) or self._begin(request, index)
        self._sequences[key] = sequence
        assert len(sequence.token_ids) - sequence.num_prompt_tokens == position
        token = self._say(sequence)
        sequence.token_ids.append(token)
        delta = TokenDelta(request.request_id, request.attempt, index, [token])
        if token == EOS:
            delta.finish_reason, delta.stop_token_id = FinishReason.STOP, EOS
        elif position + 1 == request.sampling.max_tokens:
            delta.finish_reason = FinishReason.LENGTH
        return delta

    @staticmethod
    def _begin(request: GenerateRequest, index: int) -> Sequence:
        resumed = request.resumed_output_ids
        return Sequence(
            seq_id=1,
            owner="",
            request=request,
            index=index,
            arrival_at=0.0,
            token_ids=[*request.prompt_ids, *(resumed[request.indexes.index(index)] if resumed else ())],
            num_prompt_tokens=len(request.prompt_ids),
            stop_ids=frozenset({EOS}),
            max_num_tokens=1000,
        )


async def answer(
    codec: TextCodec,
    say: Callable[[], Say],
    sampling: SamplingParams,
    options: OutputOptions,
    cut: int | None,
) -> tuple[str, FinishReason | None, int]:
    """Text, finish and token count of an output whose replica dies after `cut` tokens; None = never."""
    async with serving("a", "b") as (backend, transport):
        for replica in transport.replicas.values():
            replica.engine = SayingEngine(say())
        generation = backend.generate(prompt_ids=(5, 6), sampling=sampling)
        output = OutputText(codec.pieces, options)
        reader = asyncio.create_task(_read(Answer([PromptRun(generation, 2, (output,))], 1)))
        if cut is not None:
            await asyncio.sleep((cut + 0.5) * STEP_S)
            assert generation.num_tokens == cut
            (busy,) = (r for r in transport.replicas.values() if r.engine.requests)
            busy.die()
        await reader
        assert cut is None or generation.request.attempt == 1, "it was not resumed"
        return output.text, output.finish_reason, output.num_tokens


async def _read(answer: Answer) -> None:
    async for _ in answer.emissions():
        pass


def reciting(ids: list[int]) -> Say:
    return lambda sequence: ids[len(sequence.token_ids) - sequence.num_prompt_tokens]


@in_virtual_time
@pytest.mark.parametrize("cut", range(1, 14))
async def test_a_stop_string_is_found_wherever_the_cut_is(byte_level: TextCodec, cut: int) -> None:
    ids = byte_level.tokenizer.encode("one, STOP, THERE and more", add_special_tokens=False).ids
    options = OutputOptions(stops=("STOP, THERE",))
    found = await answer(byte_level, lambda: reciting(ids), SamplingParams(max_tokens=99), options, cut)
    whole = await answer(byte_level, lambda: reciting(ids), SamplingParams(max_tokens=99), options, None)
    assert found == whole
    assert found[:2] == ("one, ", FinishReason.STOP)


@in_virtual_time
@pytest.mark.parametrize("cut", [1, 4, 9, 15, 20])
async def test_an_object_keeps_its_schema_wherever_the_cut_is(
    byte_level: TextCodec, tmp_path: Path, cut: int
) -> None:
    folder = byte_level_folder(tmp_path)

    def say() -> Say:
        constraints = Constraints.from_folder(folder, VOCAB_SIZE, (EOS,))
        return lambda sequence: _draw(sequence, np.flatnonzero(constraints.allowed(sequence)).tolist())

    sampling = SamplingParams(max_tokens=99, grammar=SCHEMA, seed=3)
    found = await answer(byte_level, say, sampling, OutputOptions(), cut)
    assert found == await answer(byte_level, say, sampling, OutputOptions(), None)
    value = json.loads(found[0])
    assert (value.keys(), found[1]) == ({"city", "age"}, FinishReason.STOP)


@in_virtual_time
async def test_a_request_without_a_seed_goes_on_with_the_draws_it_began_with(byte_level: TextCodec) -> None:
    body = CompletionBody(prompt="x")
    texts = set()
    for seed in (11, 12):  # what the router drew
        sampling = sampling_params(body, max_tokens=30, seed=seed, special_ids={})

        def say() -> Say:
            return lambda sequence: _draw(sequence, list(range(40, 120)))

        found = await answer(byte_level, say, sampling, OutputOptions(), 12)
        assert found == await answer(byte_level, say, sampling, OutputOptions(), None)
        texts.add(found[0])
    assert len(texts) == 2


def _draw(sequence: Sequence, allowed: list[int]) -> int:
    """As an engine does: from seed, output index and position alone."""
    place = f"{sequence.sampling.seed} {sequence.index} {len(sequence.token_ids)}"
    return Random(place).choice(allowed)
