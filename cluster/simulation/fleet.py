"""Fleet: virtual replicas that start, serve, drain and die, and what routers know of them."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.simulation.replica import VirtualReplica
from cluster.simulation.transport import VirtualTransport

DRAIN_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How soon things happen; seconds."""

    cold_start_s: float
    notice_s: float = 1.0
    """Until routers hear that a replica came, or is to get no more work."""
    drain_s: float = 600.0
    """Longest wait for the answers of a replica that is to stop."""


class Fleet:
    """All replicas, on the running loop."""

    def __init__(self, make: Callable[[int], VirtualReplica], pace: Pace) -> None:
        """`make` builds a replica of the epoch given to it."""
        self.replicas: dict[str, VirtualReplica] = {}
        """Those whose process lives and can be called: serving and draining ones."""
        self.target = 0
        self.targets: list[tuple[float, int]] = []
        """Every change of the target, with its time."""
        self._make = make
        self._pace = pace
        self._epochs = itertools.count(1)
        self._serving: dict[str, None] = {}  # oldest first
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._drains: dict[str, asyncio.TimerHandle] = {}
        self._transports: list[VirtualTransport] = []
        self._num_announced = 0
        self._num_told = 0
        self._billed_s = 0.0
        self._billed_at = 0.0
        self.busy_s = 0.0
        """Time that replicas of the past spent in steps."""

    @property
    def running(self) -> list[str]:
        """Replicas that may be given work, oldest first."""
        return list(self._serving)

    def attach(self, transport: VirtualTransport) -> None:
        """Keep a router's transport informed."""
        self._transports.append(transport)

    def start_serving(self, count: int) -> None:
        """Begin with so many replicas that are warm already."""
        self.target = count
        self.targets.append((self._now(), count))
        for _ in range(count):
            self._serve(f"replica-{next(self._epochs)}")

    def set_target(self, target: int) -> None:
        """Want so many replicas: starting ones go first, then the newest, as Serve does it."""
        if target != self.target:
            self.targets.append((self._now(), target))
        self.target = target
        for _ in range(target - len(self._serving) - len(self._starting)):
            name = f"replica-{next(self._epochs)}"
            self._bill()
            self._starting[name] = asyncio.get_running_loop().create_task(self._cold_start(name))
        while len(self._serving) + len(self._starting) > target:
            self._bill()
            if self._starting:
                self._starting.popitem()[1].cancel()
            else:
                self._drain(next(reversed(self._serving)))

    def kill(self, name: str) -> None:
        """A replica's process dies, with all its state; the controller starts another one."""
        self._bill()
        self._stop(name)
        self.set_target(self.target)

    def replica_s(self) -> float:
        """Seconds of replicas so far, starting and draining ones included: somebody pays for them."""
        self._bill()
        return self._billed_s

    def close(self) -> None:
        """End all."""
        for task in self._starting.values():
            task.cancel()
        for timer in self._drains.values():
            timer.cancel()
        for name in list(self.replicas):
            self._stop(name)

    async def _cold_start(self, name: str) -> None:
        await asyncio.sleep(self._pace.cold_start_s)
        del self._starting[name]
        self._serve(name)

    def _serve(self, name: str) -> None:
        self._bill()
        replica = self._make(int(name.rpartition("-")[2]))
        self.replicas[name] = replica
        self._serving[name] = None
        run = self._runs[name] = asyncio.get_running_loop().create_task(replica.run())
        run.add_done_callback(lambda _: self._runs.pop(name))
        self._announce()

    def _drain(self, name: str) -> None:
        del self._serving[name]
        self._announce()
        until = self._now() + self._pace.drain_s
        self._look_at_drain(name, until, self._pace.notice_s + DRAIN_POLL_S)

    def _look_at_drain(self, name: str, until: float, delay_s: float = DRAIN_POLL_S) -> None:
        loop = asyncio.get_running_loop()
        self._drains[name] = loop.call_later(delay_s, self._stop_if_drained, name, until)

    def _stop_if_drained(self, name: str, until: float) -> None:
        if self.replicas[name].num_open_requests and self._now() < until:
            self._look_at_drain(name, until)
        else:
            self._stop(name)

    def _stop(self, name: str) -> None:
        self._bill()
        self._serving.pop(name, None)
        drain = self._drains.pop(name, None)
        if drain is not None:
            drain.cancel()
        replica = self.replicas.pop(name)
        replica.die()
        self.busy_s += replica.busy_s
        self._announce()

    def _announce(self) -> None:
        self._num_announced += 1
        news = self._num_announced, frozenset(self._serving)
        asyncio.get_running_loop().call_later(self._pace.notice_s, self._tell, *news)

    def _tell(self, number: int, candidates: frozenset[str]) -> None:
        if number < self._num_told:
            return  # timers of one moment have no order
        self._num_told = number
        for transport in self._transports:
            transport.tell(candidates)

    def _bill(self) -> None:
        now = self._now()
        num_alive = len(self.replicas) + len(self._starting)
        self._billed_s += num_alive * (now - self._billed_at)
        self._billed_at = now

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
