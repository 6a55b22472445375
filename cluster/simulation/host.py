"""Hosts: machines that several replicas share, so that steps take longer while neighbours work, too."""

import asyncio
import heapq
import itertools


class Host:
    """Seats for replicas that slow each other down, on the running loop.

    A step takes `1 + slowdown * n` times as long while n others are in a step as well. Steps begin and end
    within those of others: each moves on at the pace of the moment.
    """

    def __init__(self, num_seats: int, slowdown: float) -> None:
        self.num_free = num_seats
        self._slowdown = slowdown
        self._work_s = 0.0
        """What a replica that had always been in a step would have done so far, in seconds of a lone one."""
        self._moved_at = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap of the steps under way: each ends when `_work_s` is so much."""
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def factor(self) -> float:
        """How many times as long as alone a step takes that begins now, if nothing changes until its end."""
        return 1.0 + self._slowdown * len(self._ends)

    async def work(self, alone_s: float) -> None:
        """Return at the end of a step that begins now and would take so long alone."""
        loop = asyncio.get_running_loop()
        self._move(loop.time())
        end: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._ends, (self._work_s + alone_s, next(self._numbers), end))
        self._plan(loop)
        await end

    def _move(self, now: float) -> None:
        if self._ends:
            self._work_s += (now - self._moved_at) / self._step_factor()
        self._moved_at = now

    def _step_factor(self) -> float:
        return 1.0 + self._slowdown * (len(self._ends) - 1)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._ends:
            left_s = max(0.0, self._ends[0][0] - self._work_s)
            self._timer = loop.call_later(left_s * self._step_factor(), self._end_first, loop)

    def _end_first(self, loop: asyncio.AbstractEventLoop) -> None:
        """The step that is due ends; others that are due at this moment follow at once."""
        self._move(loop.time())
        work_s, _, end = heapq.heappop(self._ends)
        self._work_s = work_s  # exactly, whatever was lost in rounding
        end.set_result(None)
        self._plan(loop)


class Hosts:
    """As many machines as the replicas need."""

    def __init__(self, num_seats: int, slowdown: float) -> None:
        """`num_seats`: replicas for each host."""
        self._num_seats = num_seats
        self._slowdown = slowdown
        self._hosts: list[Host] = []

    def take_seat(self) -> Host:
        """Return the first host that has room, with a seat taken; whoever has it gives it back."""
        host = next((host for host in self._hosts if host.num_free), None)
        if host is None:
            host = Host(self._num_seats, self._slowdown)
            self._hosts.append(host)
        host.num_free -= 1
        return host
