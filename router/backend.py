"""ReplicaBackend: generations on replicas. Implements router.generation.Backend over a Transport."""

import asyncio
import itertools
from contextvars import Context
from random import Random
from typing import Final

from replicas.api import GenerateRequest, ModelCard, ReplicaLoad, SamplingParams, TokenDelta
from router.connection import Connection
from router.errors import NoReplicaError
from router.replica_generation import ReplicaGeneration
from router.routing import Candidate, choose
from router.transport import Transport

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
        resume_wait_s: float = RESUME_WAIT_S,
    ) -> None:
        """`first_epoch` must be above all epochs of earlier processes with the same `router_id`."""
        self._transport = transport
        self._router_id = router_id
        self._epochs = itertools.count(first_epoch)
        self._draw = draw
        self._resume_wait_s = resume_wait_s
        self._request_ids = itertools.count(1)
        self._is_closed = False
        self._candidates: frozenset[str] = frozenset()
        self._connections: dict[str, Connection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._generations: dict[int, ReplicaGeneration] = {}
        self._unplaced: dict[int, asyncio.TimerHandle] = {}
        """Requests without a replica -> what ends their wait."""

    def start(self) -> None:
        """Begin to follow the carrier's replicas. Call once, on the event loop."""
        self._transport.watch(self._candidates_changed)

    async def close(self) -> None:
        """End all connections; what is still open ends with an error."""
        self._is_closed = True
        self._candidates = frozenset()
        for request_id in list(self._unplaced):
            self._give_up(request_id)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def card(self) -> ModelCard | None:
        cards = (c.card for c in self._connections.values() if not c.draining)
        return next((card for card in cards if card is not None), None)

    @property
    def num_generations(self) -> int:
        """Requests in flight."""
        return len(self._generations)

    def ready(self) -> bool:
        """Whether a request could start now."""
        return self.card is not None

    def loads(self) -> dict[str, ReplicaLoad]:
        """The last report of every connected replica, draining ones included."""
        return {
            name: connection.streams.load
            for name, connection in self._connections.items()
            if connection.streams is not None
        }

    def generate(
        self,
        *,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        n: int = 1,
        tier: int = 0,
        cache_salt: str = "",
        trace_id: str = "",
    ) -> ReplicaGeneration:
        if not self.ready():
            raise NoReplicaError("no replica can serve now")
        request = GenerateRequest(
            request_id=next(self._request_ids),
            prompt_ids=prompt_ids,
            sampling=sampling,
            indexes=tuple(range(n)),
            tier=tier,
            cache_salt=cache_salt,
            trace_id=trace_id,
        )
        generation = ReplicaGeneration(request, self._forget)
        self._generations[request.request_id] = generation
        self._place_or_wait(generation)
        return generation

    def _forget(self, generation: ReplicaGeneration) -> None:
        """Drop a generation, on its replica too, unless it has ended."""
        request_id = generation.request.request_id
        if self._generations.pop(request_id, None) is None:
            return
        self._stop_waiting(request_id)
        if generation.connection is not None:
            generation.connection.abort(request_id)

    # Placing

    def _place_or_wait(self, generation: ReplicaGeneration) -> None:
        if not self._place(generation):
            request_id = generation.request.request_id
            self._unplaced[request_id] = asyncio.get_running_loop().call_later(
                self._resume_wait_s, self._give_up, request_id
            )

    def _place(self, generation: ReplicaGeneration) -> bool:
        """Give the generation to a replica that can begin, or go on with, it; False if there is none."""
        fingerprint = generation.fingerprint
        candidates = [
            Candidate(replica=connection.replica, num_busy=connection.streams.num_busy)
            for connection in self._connections.values()
            if connection.card is not None
            and connection.streams is not None
            and connection.streams.is_confirmed
            and not connection.draining
            and fingerprint in (None, connection.card.fingerprint)
        ]
        if not candidates:
            return False
        connection = self._connections[choose(candidates, self._draw).replica]
        assert connection.card is not None
        generation.connection = connection
        generation.fingerprint = connection.card.fingerprint
        connection.submit(generation.request)
        return True

    def _place_waiting(self) -> None:
        """Try again what waits: a replica has become usable."""
        for request_id in list(self._unplaced):
            if self._place(self._generations[request_id]):
                self._stop_waiting(request_id)

    def _stop_waiting(self, request_id: int) -> None:
        timer = self._unplaced.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, request_id: int) -> None:
        self._stop_waiting(request_id)
        self._generations.pop(request_id).fail("no replica could go on with this request in time")

    # Replicas

    def _candidates_changed(self, names: frozenset[str]) -> None:
        self._candidates = names
        for name, connection in self._connections.items():
            connection.set_draining(name not in names)
        for name in sorted(names - self._connections.keys()):
            self._connect(name)

    def _connect(self, name: str) -> None:
        connection = Connection(
            name,
            self._transport,
            self._router_id,
            self._epochs,
            deliver=self._deliver,
            fail=self._output_failed,
            ready=self._place_waiting,
        )
        self._connections[name] = connection
        task = asyncio.get_running_loop().create_task(connection.run(), context=Context())
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._disconnected(name))

    def _disconnected(self, name: str) -> None:
        del self._connections[name], self._tasks[name]
        if name in self._candidates:  # it came back while its connection was ending
            self._connect(name)

    def _deliver(self, delta: TokenDelta) -> None:
        generation = self._generations[delta.request_id]
        generation.push(delta)
        if generation.has_ended:
            del self._generations[delta.request_id]

    def _output_failed(self, delta: TokenDelta) -> None:
        """Go on elsewhere with a request whose replica was lost. Called once for each open output."""
        generation = self._generations.get(delta.request_id)
        if generation is None or generation.request.attempt != delta.attempt:
            return  # the first of its outputs took the others along
        generation.connection = None
        generation.num_losses += 1
        if self._is_closed or generation.num_losses >= MAX_LOSSES:
            del self._generations[delta.request_id]
            generation.fail(delta.error or "the replica of this request was lost")
            return
        generation.begin_attempt()
        self._place_or_wait(generation)
