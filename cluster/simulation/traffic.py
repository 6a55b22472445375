"""Traffic: requests as they arrive, drawn or replayed one by one. Lazy: nothing is kept of the past."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.simulation.replica import VOCAB_SIZE
from load.arrivals import unit_gaps
from load.trace import Trace, TraceRow

DIGIT: Final = VOCAB_SIZE - 2
FILLER: Final = (1,) * 200_000
"""A block's first two tokens say which it is; the others are all the same, and cost no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request as a client would send it."""

    at_s: float
    tier: int
    client: str
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Whose requests they are, and how long they may be."""

    shares: Mapping[int, float]
    """Of the clients, by tier; of the requests where a trace knows no clients."""
    max_tokens: int
    """Prompt and output together; longer prompts are cut, then outputs."""
    seed: int

    def tier(self, client: str, draw: random.Random) -> int:
        """Draw a tier: always the same one for a client."""
        source = random.Random(f"{self.seed}/{client}") if client else draw
        return source.choices(list(self.shares), list(self.shares.values()))[0]


def replay(trace: Trace, mix: Mix) -> Iterator[Arrival]:
    """Yield a trace's requests at the times they were recorded, from 0 on."""
    first_s = trace.rows[0].at_s
    return _arrivals(((row.at_s - first_s, row) for row in trace.rows), trace.block_tokens, mix)


def drawn(
    trace: Trace, mix: Mix, rate: Callable[[float], float], duration_s: float, cv: float
) -> Iterator[Arrival]:
    """Yield requests of a trace's kind at `rate(now)` per second, with gamma gaps of this CV.

    Rows are drawn with replacement, so what a trace says of shared prefixes and of the order is lost.
    """
    draw = random.Random(f"{mix.seed}/gaps")
    next_gap = unit_gaps("poisson" if cv == 1 else "gamma", cv, draw)

    def rows() -> Iterator[tuple[float, TraceRow]]:
        at_s = 0.0
        while True:
            # The rate hardly changes within a gap; at a rate of 0 time goes on by whole seconds.
            now_rate = rate(at_s)
            at_s += next_gap() / now_rate if now_rate > 0 else 1.0
            if at_s >= duration_s:
                return
            if now_rate > 0:
                row = draw.choice(trace.rows)
                yield at_s, TraceRow(at_s, row.input_tokens, row.output_tokens, (), row.client)

    return _arrivals(rows(), trace.block_tokens, mix)


def _arrivals(rows: Iterable[tuple[float, TraceRow]], block_tokens: int, mix: Mix) -> Iterator[Arrival]:
    draw = random.Random(f"{mix.seed}/tiers")
    tiers: dict[str, int] = {}  # of the clients, of whom there are few
    fresh = itertools.count(10_000_000)  # above all ids of recorded blocks
    for at_s, row in rows:
        num_input = min(row.input_tokens, mix.max_tokens - 2)
        blocks = row.blocks or (next(fresh),)
        tier = tiers.get(row.client)
        if tier is None:
            tier = mix.tier(row.client, draw)
            if row.client:
                tiers[row.client] = tier
        yield Arrival(
            at_s=at_s,
            tier=tier,
            client=row.client,
            prompt_ids=prompt(blocks, block_tokens if row.blocks else num_input, num_input),
            output_tokens=min(row.output_tokens, mix.max_tokens - 1 - num_input),
        )


def prompt(blocks: Iterable[int], block_tokens: int, num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that shares its beginning with others that begin with the same blocks."""
    if num_tokens == block_tokens:
        (block,) = blocks
        return (2 + block // DIGIT % DIGIT, 2 + block % DIGIT, *FILLER[: num_tokens - 2])[:num_tokens]
    ids: list[int] = []
    for block in blocks:
        ids += (2 + block // DIGIT % DIGIT, 2 + block % DIGIT)
        ids += FILLER[: block_tokens - 2]
    ids += FILLER[: num_tokens - len(ids)]
    return tuple(ids[:num_tokens])
