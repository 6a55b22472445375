"""RouterMeasures: what a router counts of its own work. Plain numbers; others read and export them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from router.access_log import AccessLine, Outcome
from router.histogram import ITL_EDGES_MS, LEG_EDGES_MS, WAIT_EDGES_MS, Histogram
from router.tenants import DEFAULT_TIERS, Tier

COUNTED_ROUTES: Final = ("/v1/chat/completions", "/v1/completions")
MAX_TENANTS: Final = 50
"""Tenants with figures of their own; all later ones share those of OTHER_TENANTS."""
OTHER_TENANTS: Final = "(other)"
NO_TIER: Final = "none"
"""Of requests whose sender is not known."""
TOLERATED_GAPS: Final = 0.01
"""The promise is a P99: an answer keeps it while no more than this share of its gaps is too long."""


class TierMeasures:
    """One tier's share. Times in milliseconds."""

    def __init__(self, ttft_target_ms: float | None = None, itl_target_ms: float | None = None) -> None:
        self.ttft_target_ms: Final = ttft_target_ms
        self.itl_target_ms: Final = itl_target_ms
        self.ttft_ms = Histogram(WAIT_EDGES_MS)
        """From the request's header to the first token written."""
        self.itl_ms = Histogram(ITL_EDGES_MS)
        """Between two tokens of an output, where the router writes them."""
        self.queue_wait_ms = Histogram(WAIT_EDGES_MS)
        """In this router, until a replica was chosen."""
        self.replica_ttft_ms = Histogram(WAIT_EDGES_MS)
        """From the choice of a replica to its first token here: engine and transport."""
        self.duration_ms = Histogram(WAIT_EDGES_MS)
        """From the request's header to the end of the answer."""
        self.num_late_starts = 0
        """Answers whose first token came after the target."""
        self.num_late_gaps = 0
        """Gaps longer than the target."""
        self.num_kept = 0
        """Answers that kept every target of the tier."""
        self.num_broken = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        """By outcome and, if refused or failed, the error's code."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0


class TenantMeasures:
    """One tenant's share."""

    def __init__(self) -> None:
        self.requests: Counter[Outcome] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0


class AnswerTiming:
    """The times of one answer while it is written. Its gaps count at once, its promise when it ends."""

    def __init__(
        self, measures: "RouterMeasures", level: int, began_at: float, clock: Callable[[], float]
    ) -> None:
        """`began_at` is when its request arrived, on the same monotonic clock, in seconds."""
        self._measures = measures
        self._tier = measures.tier(level)
        self.level: Final = level
        self._began_at = began_at
        self._clock = clock
        self._written: dict[int, tuple[float, int]] = {}  # output -> when last written, tokens by then
        self._ended: set[int] = set()
        self._num_gaps = 0
        self._num_late_gaps = 0
        self._is_late = False

    def wrote(self, output: int, num_tokens: int, is_last: bool) -> None:
        """An event of an output has been written; `num_tokens` are out now, earlier ones included."""
        tier, now = self._tier, self._clock()
        before = self._written.get(output)
        if before is None:
            self._note_first((now - self._began_at) * 1e3)
            num_more = num_tokens - 1
        else:
            num_more = num_tokens - before[1]
            if num_more > 0:
                gap_ms = (now - before[0]) * 1e3
                tier.itl_ms.observe(gap_ms)
                self._num_gaps += 1
                if tier.itl_target_ms is not None and gap_ms > tier.itl_target_ms:
                    self._num_late_gaps += 1
                    tier.num_late_gaps += 1
                num_more -= 1
        if num_more > 0:
            tier.itl_ms.observe(0.0, num_more)
            self._num_gaps += num_more
        self._written[output] = (now, num_tokens)
        if is_last:
            self._ended.add(output)

    def _note_first(self, ttft_ms: float) -> None:
        if self._written:
            return  # of another output
        tier = self._tier
        tier.ttft_ms.observe(ttft_ms)
        if tier.ttft_target_ms is not None and ttft_ms > tier.ttft_target_ms:
            self._is_late = True
            tier.num_late_starts += 1

    def open_gap_s(self) -> float:
        """The longest time for which a running output has written nothing; 0 before the first token."""
        running = (at for output, (at, _) in self._written.items() if output not in self._ended)
        now = self._clock()
        return now - min(running, default=now)

    def end(self) -> None:
        """No more is written. Idempotent."""
        if self not in self._measures.open_answers:
            return
        self._measures.open_answers.discard(self)
        if self._written:
            kept = not self._is_late and self._num_late_gaps <= TOLERATED_GAPS * self._num_gaps
            self._tier.num_kept += kept
            self._tier.num_broken += not kept


class RouterMeasures:
    """All of them. For one event loop; reading costs nothing but the reading."""

    def __init__(
        self,
        tiers: Iterable[Tier] = DEFAULT_TIERS,
        *,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        tiers = tuple(tiers)
        self._names = {tier.level: tier.name for tier in tiers}
        self._tiers = {tier.name: TierMeasures(tier.ttft_target_ms, tier.itl_target_ms) for tier in tiers}
        self._max_tenants = max_tenants
        self.tenants: dict[str, TenantMeasures] = {}
        self.prepare_ms = Histogram(LEG_EDGES_MS)
        """From the request's header until it waits for a replica: body, text, quota."""
        self.open_answers: set[AnswerTiming] = set()
        self.num_resumed = 0
        """Requests that went on after their replica was lost or drained."""
        self.num_withdrawn = 0
        """Requests that were asked back from a replica on which they waited."""
        self.routed_tokens = 0
        """Prompt tokens that were sent to replicas."""
        self.matched_tokens = 0
        """Of those, the ones that routing expected in the chosen replica's cache."""

    @property
    def tiers(self) -> dict[str, TierMeasures]:
        """By name."""
        return self._tiers

    def tier(self, level: int) -> TierMeasures:
        """Return the tier of a level, or what stands for all unknown ones."""
        return self._named(self.tier_name(level))

    def tier_name(self, level: int | None) -> str:
        """Return the label of a level."""
        return NO_TIER if level is None else self._names.get(level, NO_TIER)

    def begin_answer(self, level: int, began_at: float, clock: Callable[[], float]) -> AnswerTiming:
        """Watch an answer that now begins to wait for a replica, until its `end`."""
        self.prepare_ms.observe((clock() - began_at) * 1e3)
        timing = AnswerTiming(self, level, began_at, clock)
        self.open_answers.add(timing)
        return timing

    def open_gap_ms(self, name: str) -> float:
        """How long the stream of a tier that waits longest for its next token has waited."""
        open_here = (answer for answer in self.open_answers if self.tier_name(answer.level) == name)
        return 1e3 * max((answer.open_gap_s() for answer in open_here), default=0.0)

    def num_stalled(self, level: int) -> int:
        """Streams of a tier that have waited for their next token for longer than the ITL target already."""
        target_ms = self.tier(level).itl_target_ms
        if target_ms is None:
            return 0
        return sum(a.level == level and a.open_gap_s() * 1e3 > target_ms for a in self.open_answers)

    def note_request(self, line: AccessLine) -> None:
        """Count a request that has ended. Other routes than completions are not counted."""
        if line.route not in COUNTED_ROUTES:
            return
        tier = self._named(self.tier_name(line.level) if line.level is not None else line.tier or NO_TIER)
        tier.requests[line.outcome, line.code or ""] += 1
        if line.outcome == "ok":
            tier.duration_ms.observe(line.duration_ms)
        tenant = self._tenant(line.tenant) if line.tenant else None
        if tenant is not None:
            tenant.requests[line.outcome] += 1
        for counts in (tier, tenant):
            if counts is not None:
                counts.prompt_tokens += line.prompt_tokens
                counts.cached_tokens += line.cached_tokens
                counts.output_tokens += line.completion_tokens

    def note_choice(self, num_prompt_tokens: int, matched: float) -> None:
        """A replica was chosen; `matched` is the share of the prompt expected in its cache."""
        self.routed_tokens += num_prompt_tokens
        self.matched_tokens += math.floor(num_prompt_tokens * matched)

    def _named(self, name: str) -> TierMeasures:
        if name not in self._tiers:
            name = NO_TIER
        return self._tiers.setdefault(name, TierMeasures())

    def _tenant(self, name: str) -> TenantMeasures:
        if name not in self.tenants and len(self.tenants) >= self._max_tenants:
            name = OTHER_TENANTS
        return self.tenants.setdefault(name, TenantMeasures())
