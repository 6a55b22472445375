"""RouterCounters: what a router tells whoever decides on the number of replicas.

Cumulative, so that a lost report costs nothing, with an epoch, so that a restart is not taken for a fall.
Latencies are counted in buckets whose edges are the same everywhere: histograms are merged by adding,
percentiles never.
"""

from typing import Final

import msgspec

TTFT_EDGES_MS: Final = (
    *(10.0, 20.0, 50.0, 100.0, 150.0, 200.0, 300.0, 500.0, 750.0, 1000.0, 1500.0, 2000.0, 3000.0),
    *(5000.0, 7500.0, 10_000.0, 15_000.0, 20_000.0, 30_000.0, 60_000.0),
)
"""Upper edges of the buckets of times to the first token."""
ITL_EDGES_MS: Final = (
    *(1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 75.0, 100.0, 150.0),
    *(200.0, 300.0, 500.0, 1000.0, 2000.0, 5000.0),
)
"""Of gaps between tokens."""


class TierCounters(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one router has counted of one tier since its epoch began, and what of it waits there now."""

    tier: int
    num_requests: int = 0
    """Asked for, refused ones included: refused work is demand too."""
    num_rejected: int = 0
    """Refused because nobody would have served them in time."""
    input_tokens: int = 0
    """Prompt tokens of all requests asked for."""
    cached_tokens: int = 0
    """Of those, found in a prefix cache."""
    output_tokens: int = 0
    """Output tokens of all requests asked for, as expected when they arrived."""
    ttft: tuple[int, ...] = ()
    """First tokens by latency: one count per bucket of TTFT_EDGES_MS, and one for all above."""
    itl: tuple[int, ...] = ()
    """Gaps between tokens likewise, by ITL_EDGES_MS."""
    queued_input_tokens: int = 0
    """Now: prompt tokens of requests that wait in the router."""
    queued_output_tokens: int = 0
    """Now: output tokens expected of them."""
    num_stalled: int = 0
    """Now: streams whose present gap is over the tier's ITL target already."""


class RouterCounters(msgspec.Struct, frozen=True, array_like=True):
    """One report."""

    router: str
    epoch: int
    """Ascends; with another one all counts began again at zero."""
    number: int
    """1, 2, 3, ... within the epoch: of two reports the higher one is the later."""
    tiers: tuple[TierCounters, ...] = ()
