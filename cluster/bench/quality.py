"""`headway bench quality`: what quantisation costs in answers, over a text that calibration has not seen."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from cluster.bench.engine import add_model_arguments, engine_config, identity, new_engine
from cluster.bench.report import progress
from replicas.api import GenerateRequest, SamplingParams, TokenLogprobs
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.model_source import locate
from replicas.startup import open_runner

NAME = "quality"
HELP = "perplexity and agreement of a quantised model with the full one"

MAX_PERPLEXITY_RATIO = 1.015
MIN_TOP1_AGREEMENT = 0.93

_TEXT = Path(__file__).with_name("quality.txt")
_WINDOW = 504
_NUM_WINDOWS = 4
"""The text is read in so many windows of so many tokens, each on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model against its reference, over the same positions."""

    positions: int
    perplexity: float
    reference_perplexity: float
    agreement: float
    """Share of positions at which both find the same token most probable."""

    @property
    def passed(self) -> bool:
        ratio = self.perplexity / self.reference_perplexity
        return ratio <= MAX_PERPLEXITY_RATIO and self.agreement >= MIN_TOP1_AGREEMENT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.set_defaults(quantization="int8")


def run(args: argparse.Namespace) -> dict[str, object]:
    config = msgspec.structs.replace(engine_config(args, max_num_seqs=1), max_model_len=_WINDOW + 1)
    found, facts = _read(config)
    reference, _ = _read(msgspec.structs.replace(config, quantization="none"))
    comparison = compare(found, reference)
    return {
        "perplexity_ratio": comparison.perplexity / comparison.reference_perplexity,
        "top1_agreement": comparison.agreement,
        "passed": comparison.passed,
        "positions": comparison.positions,
        "perplexity": comparison.perplexity,
        "reference_perplexity": comparison.reference_perplexity,
        **facts,
    }


def compare(found: list[TokenLogprobs], reference: list[TokenLogprobs]) -> Comparison:
    """Compare what two models say about the same tokens; each entry has at least one alternative."""
    pairs = zip(found, reference, strict=True)
    agreeing = sum(ours.top[0].token_id == theirs.top[0].token_id for ours, theirs in pairs)
    return Comparison(
        positions=len(reference),
        perplexity=_perplexity(found),
        reference_perplexity=_perplexity(reference),
        agreement=agreeing / len(reference),
    )


def _perplexity(entries: list[TokenLogprobs]) -> float:
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


def _read(config: EngineConfig) -> tuple[list[TokenLogprobs], dict[str, object]]:
    """Let the model read the text; return what it says of every token but each window's first."""
    opened = open_runner(config, progress)
    engine = new_engine(opened, "continuous")
    tokenizer = Tokenizer.from_file(str(locate(config.model, progress).folder / "tokenizer.json"))
    token_ids = tokenizer.encode(_TEXT.read_text(encoding="utf-8")).ids
    said: list[TokenLogprobs] = []
    for i in range(_NUM_WINDOWS):
        said += _prompt_logprobs(engine, i, tuple(token_ids[i * _WINDOW : (i + 1) * _WINDOW]))
    return said, identity(opened)


def _prompt_logprobs(engine: Engine, request_id: int, prompt: tuple[int, ...]) -> list[TokenLogprobs]:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    engine.add(GenerateRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling), "bench")
    said: list[TokenLogprobs] = []
    while engine.has_work:
        for delta in engine.step().get("bench", ()):
            said += delta.prompt_logprobs or []
    return said
