"""RouterCounters: what a router tells whoever decides on the number of replicas.

Cumulative, so that a lost report costs nothing, with an epoch, so that a restart is not taken for a fall.
Latencies are counted in buckets whose edges are the same everywhere: histograms are merged by adding,
percentiles never.
"""

from typing import Final

import msgspec

from router.histogram import ITL_EDGES_MS, WAIT_EDGES_MS

TTFT_EDGES_MS: Final = WAIT_EDGES_MS

__all__ = ["ITL_EDGES_MS", "TTFT_EDGES_MS", "RouterCounters", "TierCounters"]


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
