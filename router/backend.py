"""ReplicaBackend: generations on replicas. Implements router.generation.Backend over a Transport."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable
from random import Random
from typing import Final

from msgspec.msgpack import encode

from replicas.api import (
    FinishReason,
    GenerateRequest,
    ModelCard,
    ReplicaLoad,
    SamplingParams,
    TierDemand,
    TokenDelta,
)
from router.admission import Admission, Ahead, Reject
from router.charges import Charges
from router.connection import Connection, ReplicaState
from router.demand_tally import DemandTally
from router.dispatch import Dispatcher, QueueState, Turn, Verdict, Waiting
from router.errors import NoReplicaError, overloaded
from router.fleet import Fleet
from router.measures import RouterMeasures
from router.prefix_index import prefix_hashes
from router.replica_generation import Client, ReplicaGeneration
from router.routing import Choice, choose
from router.service_tally import ServiceTally
from router.tenants import DEFAULT_TIERS, Tier
from router.transport import Transport
from router.waker import Wake

MAX_LOSSES: Final = 3
"""A request under which so many replicas were lost ends with an error: it may be what kills them."""
RESUME_WAIT_S: Final = 60.0
"""Longest wait of a running stream for a replica that can go on with it. A cold start fits into it."""


class ReplicaBackend:
    """Chooses a replica for every request and demultiplexes what comes back. One event loop only."""

    def __init__(
        self,
        transport: Transport,
        *,
        router_id: str,
        first_epoch: int,
        draw: Random,
        tiers: Iterable[Tier] = DEFAULT_TIERS,
        resume_wait_s: float = RESUME_WAIT_S,
        wake: Wake | None = None,
        next_to_go: Callable[[], Collection[str]] = frozenset,
        measures: RouterMeasures | None = None,
    ) -> None:
        """`first_epoch` must be above all epochs of earlier processes with the same `router_id`. With
        `wake` requests wait where there is no replica, and one is asked for; else they are refused.
        `next_to_go` names replicas to which little should be given, others being there."""
        self._draw = draw
        self._resume_wait_s = resume_wait_s
        self._request_ids = itertools.count(1)
        self._is_closed = False
        self._fleet = Fleet(
            transport,
            router_id=router_id,
            first_epoch=first_epoch,
            deliver=self._deliver,
            fail=self._output_failed,
            heard=self._dispatch_soon,
            demand=self._demand,
            leave=self._move_from,
            counters=lambda: encode(self._demand_tally.report(self._dispatcher, self._measures)),
            is_waiting=lambda: len(self._dispatcher) > 0,
            wake=wake,
            next_to_go=next_to_go,
        )
        self._demand_tally = DemandTally(router_id, first_epoch)
        self._generations: dict[int, ReplicaGeneration] = {}
        self._unstarted: dict[int, ReplicaGeneration] = {}
        """Sent to a replica that has sent nothing of this attempt yet; the latest last."""
        tiers = tuple(tiers)
        self._measures = measures or RouterMeasures(tiers)
        self._admission = Admission(tiers, draw)
        self._dispatcher = Dispatcher({tier.level: tier.aging_s for tier in tiers})
        self.service: Final = ServiceTally(self._dispatcher.charge)
        self._charges = Charges(self._dispatcher, self.service)
        self._will_dispatch = False
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Requests that wait for a replica -> what ends their wait."""

    def start(self) -> None:
        """Begin to follow the carrier's replicas. Call once, on the event loop."""
        self._fleet.start()

    async def close(self) -> None:
        """End all connections; what is still open ends with an error."""
        self._is_closed = True
        for request_id in list(self._timers):
            self._give_up(request_id)
        await self._fleet.close()

    @property
    def card(self) -> ModelCard | None:
        return self._fleet.card

    @property
    def num_usable(self) -> int:
        """Replicas that may be given work."""
        return sum(c.card is not None and not c.draining for c in self._fleet)

    @property
    def num_generations(self) -> int:
        """Requests in flight."""
        return len(self._generations)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in this router."""
        return len(self._dispatcher)

    def ready(self) -> bool:
        """Whether a request could start now."""
        return self.card is not None

    def queues(self) -> dict[int, QueueState]:
        """What waits in this router, by tier."""
        return self._dispatcher.queues(self._now())

    def states(self) -> dict[str, ReplicaState]:
        """What every replica is to this router, by name."""
        return {connection.replica: connection.state for connection in self._fleet}

    def next_to_go(self) -> Collection[str]:
        """Replicas to which little is given: they are expected to go."""
        return self._fleet.next_to_go()

    def loads(self) -> dict[str, ReplicaLoad]:
        """The last report of every connected replica, draining ones included."""
        return self._fleet.loads()

    def generate(
        self,
        *,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        n: int = 1,
        tier: int = 0,
        cache_salt: str = "",
        trace_id: str = "",
        traceparent: str = "",
        tenant: str = "",
        weight: float = 1.0,
    ) -> ReplicaGeneration:
        self._demand_tally.note_request(tier, len(prompt_ids), n, sampling.max_tokens)
        if not self.ready():
            raise NoReplicaError("no replica can serve now")
        some = self._fleet.shortlist((), self._draw)
        loads = (connection.streams.load for connection in some if connection.streams is not None)
        ahead = self._ahead(tier, tenant, weight, len(prompt_ids))
        decision = self._admission.decide(tier, ahead, loads, self._now())
        if isinstance(decision, Reject):
            self._demand_tally.note_refusal(tier)
            raise overloaded(decision.message, code=decision.reason, retry_after_s=decision.retry_after_s)
        request = GenerateRequest(
            request_id=next(self._request_ids),
            prompt_ids=prompt_ids,
            sampling=sampling,
            indexes=tuple(range(n)),
            tier=tier,
            cache_salt=cache_salt,
            trace_id=trace_id,
            traceparent=traceparent,
        )
        client = Client(tenant=tenant, weight=weight, hashes=prefix_hashes(prompt_ids, cache_salt))
        generation = ReplicaGeneration(request, client, self._forget, self._measures.tier(tier))
        generation.predicted_ttft_s = decision.predicted_ttft_s
        self._generations[request.request_id] = generation
        waiting = generation.as_waiting(self._now())
        self._dispatcher.add(waiting)
        self._limit_wait(waiting.key, decision.queue_ttl_s, self._expire)
        self._dispatch()
        self._fleet.check_wake()
        return generation

    def _forget(self, generation: ReplicaGeneration) -> None:
        """Drop a generation, on its replica too, unless it has ended."""
        request_id = generation.request.request_id
        if self._generations.pop(request_id, None) is None:
            return
        self._stop_waiting(request_id)
        self._unstarted.pop(request_id, None)
        if generation.connection is not None:
            generation.connection.abort(request_id)
        self._charges.unbegun(generation)
        self._dispatch_soon()

    # Waiting

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _ahead(self, tier: int, tenant: str, weight: float, num_prompt_tokens: int) -> Ahead:
        rooms = (connection.room(tier) for connection in self._fleet)
        num_better = self._dispatcher.num_ahead(tier - 1)
        num_outputs = num_better + self._dispatcher.num_before(tier, tenant, weight)
        has_seat = self._fleet.has_more_seats_than(num_outputs, tier)
        # With a seat nobody asks further: with many replicas the sum is most of a request's cost.
        others = () if has_seat else tuple(self._fleet)
        return Ahead(
            num_outputs=num_outputs,
            num_better=num_better,
            num_sent=sum(connection.num_own_waiting(tier) for connection in others),
            num_sent_better=sum(connection.num_own_waiting(tier - 1) for connection in others),
            num_open=sum(c.streams.num_outputs for c in others if c.streams is not None),
            num_requests=self._dispatcher.num_waiting(tier),
            queued_tokens=self._dispatcher.queued_tokens,
            has_room=any(room is not None and room.num_outputs > 0 for room in rooms),
            has_seat=has_seat,
            num_prompt_tokens=num_prompt_tokens,
        )

    def _limit_wait(self, request_id: int, limit_s: float, end: Callable[[int], None]) -> None:
        self._timers[request_id] = asyncio.get_running_loop().call_later(limit_s, end, request_id)

    def _stop_waiting(self, request_id: int) -> None:
        self._dispatcher.remove(request_id)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, request_id: int) -> None:
        self._stop_waiting(request_id)
        self._generations.pop(request_id).fail("no replica could take this request in time")

    def _expire(self, request_id: int) -> None:
        """Refuse a new request that no replica took within its tier's limit."""
        generation = self._generations[request_id]
        tier = generation.request.tier
        self._demand_tally.note_refusal(tier)
        self._stop_waiting(request_id)
        client, num_tokens = generation.client, len(generation.request.prompt_ids)
        ahead = self._ahead(tier, client.tenant, client.weight, num_tokens)
        expired = self._admission.expired(tier, ahead, self.loads().values(), self._now())
        generation.refusal = overloaded(
            expired.message, code=expired.reason, retry_after_s=expired.retry_after_s
        )
        self._give_up(request_id)

    # Dispatching

    def _dispatch_soon(self) -> None:
        """Dispatch in the next loop tick, once for all that happens in this one."""
        if not self._will_dispatch and (len(self._dispatcher) or self._unstarted):
            self._will_dispatch = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._will_dispatch = False
        self._dispatcher.dispatch(self._now(), self._place)
        self._withdraw_one()
        self._fleet.demand_changed(bool(len(self._dispatcher)))

    def _demand(self) -> tuple[TierDemand, ...]:
        return self._dispatcher.demand(len(self._fleet))

    def _place(self, turn: Turn) -> Verdict:
        """Submit a request to the best replica with room for it, if there is one."""
        some = self._fleet.shortlist(self._generations[turn.waiting.key].client.hashes, self._draw)
        verdict = self._place_on(some, turn)
        if verdict in (Verdict.PLACED, Verdict.REFUSED) or len(some) == len(self._fleet):
            return verdict
        return self._place_on(self._fleet, turn)

    def _place_on(self, connections: Iterable[Connection], turn: Turn) -> Verdict:
        generation = self._generations[turn.waiting.key]
        request = generation.request
        is_impatient = turn.waiting.is_impatient(self._now())
        fitting = []
        has_seat = False
        for connection in connections:
            room = connection.room(request.tier, turn.effective_tier)
            if room is None or room.num_outputs < 1:
                continue
            has_seat = True
            card = connection.card
            assert card is not None, "room without a card"
            fits = is_impatient or (
                room.num_outputs >= min(request.num_outputs, card.max_num_seqs)
                and room.num_blocks >= request.num_blocks(card.block_size)
            )
            if fits and generation.fingerprint in (None, card.fingerprint):
                fitting.append(connection)
        if not fitting:
            return Verdict.NO_ROOM if has_seat else Verdict.NO_SEAT
        if self._comes_too_late(turn.waiting, fitting):
            self._expire(turn.waiting.key)
            return Verdict.REFUSED
        # Rather start cold than wait, or push somebody out, where the prompt is cached.
        ready = [c for c in fitting if c.num_ready_seats >= request.num_outputs]
        candidates = self._fleet.describe(ready or fitting, generation.client.hashes)
        self._submit(generation, choose(candidates, self._draw), turn.starved_s)
        return Verdict.PLACED

    def _comes_too_late(self, waiting: Waiting, fitting: Iterable[Connection]) -> bool:
        """Whether a new request has waited so long that its seat is better given to those behind it."""
        if self._generations[waiting.key].request.attempt or self._dispatcher.num_waiting(waiting.tier) == 1:
            return False
        loads = [connection.streams.load for connection in fitting if connection.streams is not None]
        return self._admission.comes_too_late(waiting.tier, self._now() - waiting.queued_at, loads)

    def _submit(self, generation: ReplicaGeneration, choice: Choice, starved_s: float) -> None:
        connection = self._fleet[choice.replica]
        assert connection.card is not None, f"{choice.replica} was chosen without a card"
        request_id = generation.request.request_id
        self._timers.pop(request_id).cancel()
        generation.send_to(connection, connection.card.fingerprint, starved_s, self._now())
        self._measures.note_choice(len(generation.request.prompt_ids), choice.matched)
        connection.submit(generation.request, generation.client.hashes)
        self._fleet.owners.note(generation.client.hashes, choice.replica)
        self._unstarted[request_id] = generation
        self._charges.prompt_sent(generation)

    # Taking back

    def _withdraw_one(self) -> None:
        """Ask for a request back that waits where it should not; one at a time, for the answer changes
        what there is to ask for."""
        if any(generation.is_withdrawn for generation in self._unstarted.values()):
            return
        for generation in reversed(self._unstarted.values()):  # the latest waits, if any does
            request, connection = generation.request, generation.connection
            assert connection is not None, f"request {request.request_id} was sent nowhere"
            if connection.draining or not connection.has_waiting(request.tier):
                continue
            card = connection.card
            is_in_the_way = card is not None and not card.takes_seats
            is_outranked = is_in_the_way and self._dispatcher.is_outranked(request.tier, request.waited_s)
            if is_outranked or any(map(generation.could_start_on, self._fleet)):
                generation.is_withdrawn = True
                self._measures.num_withdrawn += 1
                connection.withdraw(request.request_id)
                return

    def _taken_back(self, generation: ReplicaGeneration) -> None:
        """Queue a request again of which its replica says that it had not started."""
        assert generation.connection is not None, "taken back from nowhere"
        generation.connection.abort(generation.request.request_id)  # its other outputs
        self._go_on_elsewhere(generation)
        self._dispatcher.starves_since(generation.request.tier, generation.starving_since)
        self._dispatch_soon()

    # Replicas

    def _deliver(self, delta: TokenDelta) -> None:
        generation = self._generations.get(delta.request_id)
        if generation is None or generation.request.attempt != delta.attempt:
            return  # ended, or taken back, by an earlier delta of this frame
        if delta.finish_reason is FinishReason.ABORT:
            self._taken_back(generation)
            return
        self._unstarted.pop(delta.request_id, None)
        self._demand_tally.note_delta(generation.request.tier, delta, not generation.has_begun)
        if delta.num_cached_tokens is not None:
            self._charges.prompt_cached(generation, delta.num_cached_tokens)
        self._charges.generated(generation, len(delta.token_ids))
        generation.push(delta)
        if delta.finish_reason is not None:
            now = self._now()
            seconds = now - (generation.times.sent_at or now)
            is_saturated = len(self._dispatcher) > 0
            self._admission.note_end(generation.request.tier, seconds, now, is_saturated=is_saturated)
        if generation.has_ended:
            self._generations.pop(delta.request_id, None)

    def _output_failed(self, delta: TokenDelta) -> None:
        """Go on elsewhere with a request whose replica was lost. Called once for each open output."""
        generation = self._generations.get(delta.request_id)
        if generation is None or generation.request.attempt != delta.attempt:
            return  # the first of its outputs took the others along
        generation.num_losses += 1
        if self._is_closed or generation.num_losses >= MAX_LOSSES:
            del self._generations[delta.request_id]
            self._unstarted.pop(delta.request_id, None)
            generation.fail(delta.error or "the replica of this request was lost")
            return
        self._measures.num_resumed += 1
        self._go_on_elsewhere(generation)
        self._dispatch_soon()

    def _move_from(self, connection: Connection) -> bool:
        """Move what still runs on a draining replica, as far as others have room; False if nothing does."""
        remaining = [g for g in self._generations.values() if g.connection is connection]
        for generation in remaining:
            if any(generation.fits(other) for other in self._fleet):
                connection.abort(generation.request.request_id)
                self._measures.num_resumed += 1
                self._go_on_elsewhere(generation)
                self._dispatch()
        return bool(remaining)

    def _go_on_elsewhere(self, generation: ReplicaGeneration) -> None:
        self._unstarted.pop(generation.request.request_id, None)
        self._charges.unbegun(generation)
        generation.begin_attempt()
        waiting = generation.as_waiting(self._now())
        self._dispatcher.add_first(waiting)
        self._limit_wait(waiting.key, self._resume_wait_s, self._give_up)
