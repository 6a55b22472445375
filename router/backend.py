"""ReplicaBackend: generations on replicas. Implements router.generation.Backend over a Transport."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextvars import Context
from random import Random

from replicas.api import GenerateRequest, ModelCard, ReplicaLoad, SamplingParams, TokenDelta
from router.connection import Connection
from router.errors import NoReplicaError
from router.routing import Candidate, choose
from router.transport import Transport


class ReplicaGeneration:
    """One request in flight; see router.generation.Generation. For one consumer.

    A consumer that is slower than its tokens finds them coalesced: what waits here is one delta per
    output, and its size is bounded by max_tokens.
    """

    def __init__(self, backend: "ReplicaBackend", connection: Connection, request: GenerateRequest) -> None:
        self.request = request
        self.connection = connection
        self._backend = backend
        self._waiting: dict[int, TokenDelta] = {}  # by output index, oldest first
        self._num_running = len(request.indexes)  # outputs whose finish has not arrived
        self._num_unread = len(request.indexes)  # outputs whose finish the consumer has not seen
        self._arrived = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._waiting and self._num_unread:
            self._arrived.clear()
            await self._arrived.wait()
        if not self._num_unread:
            raise StopAsyncIteration
        delta = self._waiting.pop(next(iter(self._waiting)))
        self._num_unread -= delta.finish_reason is not None
        return delta

    @property
    def has_ended(self) -> bool:
        """Every output has its finish."""
        return not self._num_running

    def push(self, delta: TokenDelta) -> None:
        """Hand a delta to the consumer."""
        self._num_running -= delta.finish_reason is not None
        waiting = self._waiting.get(delta.index)
        if waiting is None:
            self._waiting[delta.index] = delta
        else:
            waiting.append(delta)
        self._arrived.set()

    def abort(self) -> None:
        self._backend.forget(self)
        self._waiting.clear()
        self._num_unread = 0
        self._arrived.set()


class ReplicaBackend:
    """Chooses a replica for every request and demultiplexes what comes back. One event loop only."""

    def __init__(self, transport: Transport, *, router_id: str, first_epoch: int, draw: Random) -> None:
        """`first_epoch` must be above all epochs of earlier processes with the same `router_id`."""
        self._transport = transport
        self._router_id = router_id
        self._epochs = itertools.count(first_epoch)
        self._draw = draw
        self._request_ids = itertools.count(1)
        self._candidates: frozenset[str] = frozenset()
        self._connections: dict[str, Connection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._generations: dict[int, ReplicaGeneration] = {}

    def start(self) -> None:
        """Begin to follow the carrier's replicas. Call once, on the event loop."""
        self._transport.watch(self._candidates_changed)

    async def close(self) -> None:
        """End all connections; what is still open ends with an error."""
        self._candidates = frozenset()
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
        candidates = [
            Candidate(replica=connection.replica, num_busy=connection.streams.num_busy)
            for connection in self._connections.values()
            if connection.streams is not None and not connection.draining
        ]
        if not candidates:
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
        connection = self._connections[choose(candidates, self._draw).replica]
        generation = ReplicaGeneration(self, connection, request)
        self._generations[request.request_id] = generation
        connection.submit(request)
        return generation

    def forget(self, generation: ReplicaGeneration) -> None:
        """Abort a generation on its replica, unless it has ended."""
        if self._generations.pop(generation.request.request_id, None) is not None:
            generation.connection.abort(generation.request.request_id)

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
        """Decide what becomes of an output whose replica was lost: it ends with the error `delta`.

        The place for resume: a new attempt elsewhere, with the ids generated so far.
        """
        self._deliver(delta)
