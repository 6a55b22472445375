"""Oracle: how many replicas there had to be, for somebody who knew all requests before they came. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.simulation.scaling import TICK_S
from cluster.simulation.traffic import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The mean request, and how many of them one replica serves in a second."""

    input_tokens: float
    output_tokens: float
    rate: float
    input_share: float
    """Of its work, the part that its prompt is."""
    output_token_s: float
    """Between two tokens of an output."""


def work_by_tick(arrivals: Iterable[Arrival], mean: Mean, duration_s: float) -> list[float]:
    """Return the replicas kept busy in each TICK_S: by prompts as they come, by outputs as they decode."""
    work = [0.0] * (math.ceil(duration_s / TICK_S) + 1)
    per_input = mean.input_share / mean.input_tokens / mean.rate / TICK_S
    per_output = (1 - mean.input_share) / mean.output_tokens / mean.rate / TICK_S
    for arrival in arrivals:
        first = int(arrival.at_s / TICK_S)
        ends_s = min(duration_s, arrival.at_s + arrival.output_tokens * mean.output_token_s)
        last = int(ends_s / TICK_S)
        work[first] += len(arrival.prompt_ids) * per_input
        for tick in range(first, last + 1):
            work[tick] += arrival.output_tokens * per_output / (last - first + 1)
    return work


def counts(work: Sequence[float], utilisation: float) -> list[int]:
    """Return the least whole replicas that such work keeps busy to no more than this share."""
    return [max(1, math.ceil(busy / utilisation)) for busy in work]
