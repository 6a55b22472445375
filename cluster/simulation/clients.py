"""Clients: send requests to the routers, read, give up or try again, and note what they got."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulation.gaps import GapClock
from cluster.simulation.measures import Measures, TierMeasures
from cluster.simulation.traffic import Arrival
from replicas.api import SamplingParams
from router.backend import ReplicaBackend
from router.errors import NO_REPLICA_RETRY_AFTER_S, ApiError, NoReplicaError
from router.measures import RouterMeasures
from router.replica_generation import ReplicaGeneration


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What clients do that is not in a trace."""

    retries: int = 0
    """How often a refused request comes back, each time when Retry-After says."""
    cancel_fraction: float = 0.0
    """Share of the requests whose client goes away, at a random moment of the first `cancel_s` seconds."""
    cancel_s: float = 10.0


class Clients:
    """All clients, on the running loop. A request costs memory only while it is open."""

    def __init__(
        self,
        routers: Sequence[ReplicaBackend],
        counts: Sequence[RouterMeasures],
        measures: Measures,
        habits: Habits,
        draw: random.Random,
    ) -> None:
        """`counts` are those of the routers: HTTP, which fills in the latencies, is not simulated."""
        self._routers = routers
        self._counts = counts
        self._measures = measures
        self._habits = habits
        self._draw = draw
        self.gaps = GapClock()
        self.num_open = 0
        self.open_s = 0.0
        """Seconds that requests were open, added up, as of the last change of their number."""
        self._changed_at = 0.0
        self.input_tokens = 0
        self.output_tokens = 0
        """Asked for so far, refused requests included."""
        self.slowest_ttft = 0.0
        """Of the first tokens since somebody set this to 0, the latest as a share of its tier's target."""

    async def ask(self, arrival: Arrival) -> None:
        """Send one request and see it through."""
        self._count_open(1)
        self.input_tokens += len(arrival.prompt_ids)
        self.output_tokens += arrival.output_tokens
        try:
            await self._ask(arrival)
        finally:
            self._count_open(-1)

    def _count_open(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        self.open_s += self.num_open * (now - self._changed_at)
        self._changed_at = now
        self.num_open += change

    async def _ask(self, arrival: Arrival) -> None:
        loop = asyncio.get_running_loop()
        tier = self._measures.tiers[arrival.tier]
        arrived_at = loop.time()
        for attempt in range(self._habits.retries + 1):
            number = self._draw.randrange(len(self._routers))
            try:
                await self._read(number, arrival, tier, arrived_at)
                return
            except ApiError as error:
                wait_s = float(error.retry_after_s or NO_REPLICA_RETRY_AFTER_S)
            except NoReplicaError:
                wait_s = float(NO_REPLICA_RETRY_AFTER_S)
            if attempt < self._habits.retries:
                await asyncio.sleep(wait_s)
        tier.refused += 1
        self.slowest_ttft = math.inf
        tier.first_token(arrived_at, None)

    async def _read(self, number: int, arrival: Arrival, tier: TierMeasures, arrived_at: float) -> None:
        """Raise ApiError or NoReplicaError when nothing was generated."""
        loop = asyncio.get_running_loop()
        generation = self._routers[number].generate(
            prompt_ids=arrival.prompt_ids,
            sampling=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True),
            tier=arrival.tier,
            tenant=arrival.client,
        )
        key = f"router-{number}", generation.request.request_id
        counts = self._counts[number].tier(arrival.tier)
        self.gaps.begin(*key, tier, counts.itl_ms)
        timer = self._goes_away(generation, tier)
        began = False
        try:
            async for delta in generation:
                if not began and delta.token_ids:
                    began = True
                    ttft_s = loop.time() - arrived_at
                    self.slowest_ttft = max(self.slowest_ttft, ttft_s / tier.ttft_target_s)
                    tier.first_token(arrived_at, ttft_s)
                    counts.ttft_ms.observe(ttft_s * 1e3)
                if delta.error is not None:
                    if generation.refusal is not None and not began:
                        raise generation.refusal
                    tier.failed += 1
            if timer is None or not timer.cancelled():
                tier.e2e.add(loop.time() - arrived_at)
            if not began and generation.refusal is None:
                tier.first_token(arrived_at, None)
        finally:
            if timer is not None:
                timer.cancel()
            self.gaps.end(*key)

    def _goes_away(self, generation: ReplicaGeneration, tier: TierMeasures) -> asyncio.TimerHandle | None:
        if self._draw.random() >= self._habits.cancel_fraction:
            return None

        def hang_up() -> None:
            tier.cancelled += 1
            generation.abort()

        delay_s = self._draw.uniform(0.0, self._habits.cancel_s)
        return asyncio.get_running_loop().call_later(delay_s, hang_up)
