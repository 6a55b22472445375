"""DemandTally: what is asked of this router, in tokens, for whoever decides on the number of replicas.

What is refused counts as asked: else a system that sheds work would look like a quiet one.
"""

from collections.abc import Iterable
from typing import Final

from replicas.api import TokenDelta
from router.counters import RouterCounters, TierCounters
from router.dispatch import Waiting
from router.measures import RouterMeasures

FIRST_GUESS_TOKENS: Final = 256
"""Length of an output, as long as no output of its tier has ended."""
MEMORY: Final = 0.99
"""What earlier outputs weigh in the mean length after one more: the last hundred count."""


class _TierTally:
    def __init__(self) -> None:
        self.num_requests = 0
        self.num_rejected = 0
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self._generated = 0.0
        self._num_ended = 0.0

    def expected(self, num_outputs: int, max_tokens: int) -> int:
        """Output tokens that a request will probably bring.

        The mean is not cut off at `max_tokens`: where requests ask for just what they get, that would leave
        out what the long ones bring above it, a third of all for exponential lengths.
        """
        if not self._num_ended:
            return num_outputs * min(max_tokens, FIRST_GUESS_TOKENS)
        return round(num_outputs * self._generated / self._num_ended)

    def note(self, delta: TokenDelta, is_first: bool) -> None:
        self._generated += len(delta.token_ids)
        if is_first:
            self.cached_tokens += delta.num_cached_tokens or 0
        if delta.finish_reason is not None:
            self._num_ended = MEMORY * self._num_ended + 1
            self._generated *= MEMORY


class DemandTally:
    """Counts from the router's start on. For one event loop."""

    def __init__(self, router: str, epoch: int) -> None:
        """`epoch` ascends over restarts of the same router."""
        self._router = router
        self._epoch = epoch
        self._number = 0
        self._tiers: dict[int, _TierTally] = {}

    def note_request(self, tier: int, num_input: int, num_outputs: int, max_tokens: int) -> None:
        """A request has come, whatever becomes of it. `max_tokens` is for each output."""
        tally = self._tally(tier)
        tally.num_requests += 1
        tally.input_tokens += num_input
        tally.output_tokens += tally.expected(num_outputs, max_tokens)

    def note_refusal(self, tier: int) -> None:
        """A request that came will not be served: nobody could have in time."""
        self._tally(tier).num_rejected += 1

    def note_delta(self, tier: int, delta: TokenDelta, is_first: bool) -> None:
        """Something of a request came back. What its later outputs, or attempts, find in a cache is its own
        work: only the first delta says what was saved."""
        self._tally(tier).note(delta, is_first)

    def report(self, waiting: Iterable[Waiting], measures: RouterMeasures) -> RouterCounters:
        """Return all counts, with the latencies of `measures`; `waiting` are the requests that wait in this
        router now. O(waiting + open answers)."""
        queued_input: dict[int, int] = {}
        queued_output: dict[int, int] = {}
        for entry in waiting:
            tier, tally = entry.tier, self._tally(entry.tier)
            queued_input[tier] = queued_input.get(tier, 0) + entry.num_tokens
            expected = tally.expected(entry.num_outputs, entry.max_tokens)
            queued_output[tier] = queued_output.get(tier, 0) + expected
        self._number += 1
        tiers = tuple(
            TierCounters(
                tier,
                num_requests=tally.num_requests,
                num_rejected=tally.num_rejected,
                input_tokens=tally.input_tokens,
                cached_tokens=tally.cached_tokens,
                output_tokens=tally.output_tokens,
                ttft=tuple(measures.tier(tier).ttft_ms.counts),
                itl=tuple(measures.tier(tier).itl_ms.counts),
                num_stalled=measures.num_stalled(tier),
                queued_input_tokens=queued_input.get(tier, 0),
                queued_output_tokens=queued_output.get(tier, 0),
            )
            for tier, tally in sorted(self._tiers.items())
        )
        return RouterCounters(self._router, self._epoch, self._number, tiers)

    def _tally(self, tier: int) -> _TierTally:
        tally = self._tiers.get(tier)
        if tally is None:
            tally = self._tiers[tier] = _TierTally()
        return tally
