"""Scaling: who decides on the number of replicas while a simulation runs, and what it is shown."""

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.simulation.clients import Clients
from cluster.simulation.fleet import Fleet

TICK_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a decision may look at."""

    now: float
    """Seconds since requests may come."""
    fleet: Fleet
    clients: Clients

    @property
    def num_open(self) -> int:
        """Requests that are open at the routers, waiting ones included."""
        return self.clients.num_open

    def take_slowest_ttft(self) -> float:
        """Return the slowest first token since the last call, as a share of its tier's target."""
        slowest, self.clients.slowest_ttft = self.clients.slowest_ttft, 0.0
        return slowest


class Scaler(Protocol):
    """Decides every TICK_S."""

    def decide(self, view: View) -> int:
        """Return how many replicas there should be."""
        ...


class Fixed:
    """The same number all the time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def decide(self, view: View) -> int:  # noqa: ARG002 - a Scaler
        return self._count


async def control(scaler: Scaler, fleet: Fleet, clients: Clients) -> None:
    """Ask the scaler for ever."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    while True:
        fleet.set_target(scaler.decide(View(now=loop.time() - started_at, fleet=fleet, clients=clients)))
        await asyncio.sleep(TICK_S)
