"""Arrivals sent to a server over HTTP, each when it is due, and what their client saw."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.workload import random_prompt
from cluster.simulation.traffic import Arrival
from load.answer import Answer
from load.client import Client
from load.completion import Dialect
from load.connection import parse_target

VOCAB_SIZE = 1000
"""Of the prompts: frequent tokens, which are words or parts of them."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The client's times of one request, on time.perf_counter."""

    due_at: float
    answer: Answer


def replay_http(url: str, model: str, arrivals: Sequence[Arrival], seed: int) -> list[Replayed]:
    """Send each arrival when it is due, with a random prompt of its length, and read the answers.

    Raises RuntimeError if one fails.
    """
    draw = random.Random(seed)
    dialect = Dialect(api="completions", model=model, extra_body={"ignore_eos": True, "temperature": 0.0})
    prompts = [random_prompt(len(arrival.prompt_ids), VOCAB_SIZE, draw) for arrival in arrivals]
    bodies = [
        dialect.body([], arrival.output_tokens, {"prompt": prompt})
        for arrival, prompt in zip(arrivals, prompts, strict=True)
    ]
    return asyncio.run(_replay(url, dialect.path, arrivals, bodies))


async def _replay(
    url: str, path: str, arrivals: Sequence[Arrival], bodies: Sequence[bytes]
) -> list[Replayed]:
    tasks: list[asyncio.Task[Answer]] = []
    async with Client(parse_target(url), request_timeout_s=TIMEOUT_S) as client:
        started_at = time.perf_counter()
        for arrival, body in zip(arrivals, bodies, strict=True):
            await asyncio.sleep(started_at + arrival.at_s - time.perf_counter())
            tasks.append(asyncio.create_task(client.post(path, body)))
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        if answer.failure is not None:
            raise RuntimeError(f"a request failed: {answer.failure} {answer.detail}")
    return [
        Replayed(due_at=started_at + arrival.at_s, answer=answer)
        for arrival, answer in zip(arrivals, answers, strict=True)
    ]
