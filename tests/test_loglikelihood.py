"""Evaluation through /v1/completions, as lm-eval-harness does it: real engine, real router, no sockets."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.api import GenerateRequest, SamplingParams, TokenDelta
from replicas.engine import Engine
from replicas.startup import OpenedRunner
from router.app import App, build_app
from router.errors import ApiError
from router.generation import GenerationTimes
from router.text import TextCodec
from tests.replicas.test_model_engine import open_tiny
from tests.replicas.tiny_models import llama, save
from tests.router.asgi_client import TEXT, call
from tests.router.tiny_tokenizers import byte_level_folder

VOCAB_SIZE = 300
EOS = 2


class Played:
    """A generation that has ended."""

    refusal: ApiError | None = None
    queue_wait_s: float | None = None
    times = GenerationTimes()

    def __init__(self, deltas: list[TokenDelta]) -> None:
        self._deltas = deltas

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        for delta in self._deltas:
            yield delta

    def abort(self, index: int | None = None) -> None:
        """Too late."""


class EngineBackend:
    """Runs every request to its end on an engine of its own."""

    def __init__(self, opened: OpenedRunner) -> None:
        self._opened = opened
        self.card = opened.card

    def generate(
        self,
        *,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        n: int = 1,
        **_: Any,
    ) -> Played:
        engine = Engine(
            self._opened.resolved,
            self._opened.runner,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        indexes = tuple(range(n))
        engine.add(
            GenerateRequest(request_id=1, prompt_ids=prompt_ids, sampling=sampling, indexes=indexes), ""
        )
        deltas: list[TokenDelta] = []
        while engine.has_work:
            deltas += engine.step().get("", [])
        return Played(deltas)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama()
    config.vocab_size = VOCAB_SIZE
    path = save(config, tmp_path_factory.mktemp("llama"))
    return byte_level_folder(path)


@pytest.fixture(scope="module")
def app(folder: Path) -> App:
    opened = open_tiny(folder, 32, quantization="none")
    return build_app(EngineBackend(opened), TextCodec.from_folder(folder))


def expected(folder: Path, ids: list[int], num_context: int) -> tuple[float, bool]:
    """transformers' own: the summed logprob of what follows the context, and whether it is greedy."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    rows, following = rows[num_context - 1 : -1], torch.tensor(ids[num_context:])
    picked = rows.gather(1, following[:, None]).sum()
    return float(picked), bool((rows.argmax(dim=-1) == following).all())


def loglikelihood(choice: Any, num_context: int) -> tuple[float, bool]:
    """lm_eval.models.openai_completions.LocalCompletionsAPI.parse_logprobs, for one choice."""
    found = choice["logprobs"]
    logprobs = found["token_logprobs"][num_context:-1]
    tops = found["top_logprobs"][num_context:-1]
    return sum(logprobs), all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))


def greedy_continuation(folder: Path, context: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = list(context)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("ends_at_once", [False, True])
async def test_loglikelihoods_are_those_of_transformers(app: App, folder: Path, ends_at_once: bool) -> None:
    """With one token generated, also when it is the one that ends the answer and has no text."""
    draw = random.Random(1)
    contexts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 20, 70)]
    rows = [context + [draw.randrange(3, VOCAB_SIZE) for _ in range(5)] for context in contexts]
    rows.append(greedy_continuation(folder, contexts[1], 3))
    lengths = [*map(len, contexts), len(contexts[1])]
    body: dict[str, Any] = {"prompt": rows, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    if ends_at_once:
        body["logit_bias"] = {str(EOS): 100}
    choices = (await call(app, TEXT, body)).json["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop" if ends_at_once else "length"}
    verdicts = []
    for choice, ids, num_context in zip(choices, rows, lengths, strict=True):
        found, is_greedy = loglikelihood(choice, num_context)
        wanted, should_be_greedy = expected(folder, ids, num_context)
        assert found == pytest.approx(wanted, abs=1e-3)
        assert is_greedy == should_be_greedy
        verdicts.append(is_greedy)
    assert verdicts == [False, False, False, True]
