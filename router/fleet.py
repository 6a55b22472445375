"""Fleet: a router's connections to all replicas, those that drain included."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import Context
from heapq import nsmallest
from random import Random
from typing import Final

from replicas.api import ModelCard, ReplicaLoad, TierDemand, TokenDelta
from router.connection import Connection
from router.routing import Candidate
from router.shortlist import PrefixOwners
from router.transport import Transport
from router.waker import Wake, Waker

DRAIN_PATIENCE_S: Final = 10.0
"""A stream that runs longer than this on a draining replica moves to another one that has room."""

NUM_TOLD: Final = 3
"""Replicas that pass a router's counters on. More than one: any may be lost, or busy."""


class Fleet:
    """Follows the carrier's replicas: connects to new ones, and leaves drained ones. One event loop only."""

    def __init__(
        self,
        transport: Transport,
        *,
        router_id: str,
        first_epoch: int,
        deliver: Callable[[TokenDelta], None],
        fail: Callable[[TokenDelta], None],
        heard: Callable[[], None],
        demand: Callable[[], tuple[TierDemand, ...]],
        leave: Callable[[Connection], bool],
        counters: Callable[[], bytes],
        is_waiting: Callable[[], bool],
        wake: Wake | None,
        next_to_go: Callable[[], Collection[str]],
    ) -> None:
        """Most are those of Connection. `leave` moves streams away from a replica that drains for long;
        False when none is left. `counters` is asked for what a few of the replicas are to be told.
        While `is_waiting` and no replica is there, `wake` asks for one; without it nobody is asked.
        `next_to_go` names the replicas to which little should be given."""
        self._transport = transport
        self._router_id = router_id
        self._epochs = itertools.count(first_epoch)
        self._deliver = deliver
        self._fail = fail
        self._heard = heard
        self._demand = demand
        self._leave = leave
        self._is_waiting = is_waiting
        self._waker = Waker(wake, self._needs_replica)
        self.next_to_go: Final = next_to_go
        self._counters = counters
        self._candidates: frozenset[str] = frozenset()
        self._told: frozenset[str] = frozenset()
        self._connections: dict[str, Connection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last_card: ModelCard | None = None
        self._is_demanding = False
        self.owners: Final = PrefixOwners()

    def start(self) -> None:
        """Begin to follow the carrier's replicas. Call once, on the event loop."""
        self._transport.watch(self._candidates_changed)

    async def close(self) -> None:
        """End all connections; what is still open on them fails."""
        self._candidates = frozenset()
        self._waker.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections.values())

    def __len__(self) -> int:
        return len(self._connections)

    def __getitem__(self, replica: str) -> Connection:
        return self._connections[replica]

    @property
    def card(self) -> ModelCard | None:
        """The served model; None while no replica can serve, and none can be asked for."""
        return self._last_card if self._waker.can_call else self._live_card

    @property
    def _live_card(self) -> ModelCard | None:
        cards = (connection.card for connection in self if not connection.draining)
        return next((card for card in cards if card is not None), None)

    def loads(self) -> dict[str, ReplicaLoad]:
        """The last report of every connected replica, draining ones included."""
        return {
            name: connection.streams.load
            for name, connection in self._connections.items()
            if connection.streams is not None
        }

    def shortlist(self, hashes: Iterable[int], draw: Random) -> Collection[Connection]:
        """Return the replicas to compare for a prompt with these prefix hashes."""
        return self.owners.shortlist(self._connections, hashes, draw)

    def describe(self, connections: Iterable[Connection], hashes: Sequence[int]) -> list[Candidate]:
        """Describe replicas to routing, for a prompt of these prefix hashes. They need open epochs."""
        next_to_go = self.next_to_go()
        return [c.as_candidate(hashes, c.replica in next_to_go) for c in connections]

    def check_wake(self) -> None:
        """Ask for a replica, or cease, if that has changed: call when requests begin to wait."""
        self._waker.check()

    def _needs_replica(self) -> bool:
        """There is none, and requests wait, or would be refused because the model is not known yet."""
        return not self._candidates and (self._is_waiting() or self._last_card is None)

    def demand_changed(self, is_demanding: bool) -> None:
        """Tell the replicas at once when requests begin, or cease, to wait for credits."""
        if is_demanding == self._is_demanding:
            return
        self._is_demanding = is_demanding
        for connection in self:
            connection.demand_changed()

    def has_more_seats_than(self, num_outputs: int, tier: int) -> bool:
        """Whether outputs of a tier may find more free seats than that. Stops where they suffice."""
        num_seats = 0
        for connection in self:
            num_seats += connection.num_free_seats(tier)
            if num_seats > num_outputs:
                return True
        return False

    def _candidates_changed(self, names: frozenset[str]) -> None:
        self._candidates = names
        self._told = frozenset(nsmallest(NUM_TOLD, names))
        for name, connection in self._connections.items():
            if name not in names and not connection.draining:
                self._leave_later(connection)
            connection.set_draining(name not in names)
        for name in sorted(names - self._connections.keys()):
            self._connect(name)
        self.check_wake()

    def _leave_later(self, connection: Connection) -> None:
        asyncio.get_running_loop().call_later(DRAIN_PATIENCE_S, self._leave_now, connection)

    def _leave_now(self, connection: Connection) -> None:
        if not connection.draining or self._connections.get(connection.replica) is not connection:
            return
        if self._leave(connection):
            self._leave_later(connection)

    def _connect(self, name: str) -> None:
        connection = Connection(
            name,
            self._transport,
            self._router_id,
            self._epochs,
            deliver=self._deliver,
            fail=self._fail,
            heard=self._note_heard,
            demand=self._demand,
            counters=self._counters_for,
        )
        self._connections[name] = connection
        task = asyncio.get_running_loop().create_task(connection.run(), context=Context())
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._disconnected(name))

    def _note_heard(self) -> None:
        self._last_card = self._live_card or self._last_card
        self._heard()

    def _counters_for(self, replica: str) -> bytes:
        """What a replica is told: they all reach the same autoscaler, so a few of them are enough."""
        return self._counters() if replica in self._told else b""

    def _disconnected(self, name: str) -> None:
        del self._connections[name], self._tasks[name]
        if name in self._candidates:  # it came back while its connection was ending
            self._connect(name)
