"""`headway bench speculation`: what guessing tokens gains on text that repeats itself, and costs on other."""

import argparse

import msgspec
from tokenizers import Tokenizer

from cluster.arguments import at_least_one
from cluster.bench.drive import Drive, drive
from cluster.bench.engine import add_model_arguments, engine_config, identity
from cluster.bench.report import progress
from cluster.bench.workload import fixed_length_request
from replicas.engine import Engine
from replicas.startup import OpenedRunner, open_runner

NAME = "speculation"
HELP = "tokens/s with and without prompt lookup, on repetitive and on other text"

_TIMETABLE = "".join(
    f"The train to {town} leaves at {hour}:{minute} from platform {platform}.\n"
    for town, hour, minute, platform in [
        ("Basel", 9, 14, 3),
        ("Lyon", 10, 27, 5),
        ("Turin", 11, 48, 2),
        ("Vienna", 12, 33, 7),
        ("Ghent", 14, 52, 4),
    ]
)
_REPETITIVE = 3 * _TIMETABLE
_OTHER = "Write a short story about a lighthouse keeper who finds a letter from his own future."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--speculative-tokens", type=at_least_one, default=6)
    parser.add_argument("--streams", type=at_least_one, default=1, help="the same text so many times at once")
    parser.add_argument("--output-tokens", type=at_least_one, default=96)


def run(args: argparse.Namespace) -> dict[str, object]:
    opened = open_runner(engine_config(args, max_num_seqs=args.streams), progress)
    tokenizer = Tokenizer.from_file(str(opened.files.folder / "tokenizer.json"))
    report: dict[str, object] = {}
    for kind, text in (("repetitive", _REPETITIVE), ("other", _OTHER)):
        prompt = tuple(tokenizer.encode(text).ids)
        off, on = (_engine(opened, count) for count in (0, args.speculative_tokens))
        _drive(off, prompt, args)  # pages touched, kernels loaded
        before, after = _drive(off, prompt, args), _drive(on, prompt, args)
        counters = on.counters
        report |= {
            f"{kind}_tokens_per_s_off": before.output_tokens_per_s,
            f"{kind}_tokens_per_s_on": after.output_tokens_per_s,
            f"{kind}_ratio": after.output_tokens_per_s / before.output_tokens_per_s,
            f"{kind}_steps_off": len(before.step_ms),
            f"{kind}_steps_on": len(after.step_ms),
            f"{kind}_draft_tokens": counters.draft_tokens,
            f"{kind}_acceptance_rate": counters.accepted_tokens / max(1, counters.draft_tokens),
        }
    return {**report, "streams": args.streams, "output_tokens": args.output_tokens, **identity(opened)}


def _engine(opened: OpenedRunner, num_drafts: int) -> Engine:
    config = msgspec.structs.replace(opened.resolved, num_speculative_tokens=num_drafts)
    eos = frozenset(opened.card.eos_token_ids)
    return Engine(config, opened.runner, vocab_size=opened.card.vocab_size, eos_token_ids=eos)


def _drive(engine: Engine, prompt: tuple[int, ...], args: argparse.Namespace) -> Drive:
    engine.scheduler.cache.pool.forget_all()
    requests = [fixed_length_request(i, prompt, args.output_tokens) for i in range(args.streams)]
    return drive(engine, requests, args.streams)
