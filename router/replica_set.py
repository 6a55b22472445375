"""ReplicaSet: which replicas exist right now, shared by everything in a router's process."""

import asyncio
import functools
import threading
from collections.abc import Callable
from contextvars import Context


class ReplicaSet:
    """The names of all candidate replicas, published by Serve's thread and watched from event loops.

    Serve stops listing a replica as soon as it drains, so leaving the set is the drain signal. Whoever
    still has business with such a replica holds its name: held replicas stay callable until released.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        self._holds: dict[str, int] = {}
        self._released: Callable[[], None] | None = None
        self._watchers: list[tuple[asyncio.AbstractEventLoop, Callable[[frozenset[str]], None]]] = []

    def publish(self, names: frozenset[str]) -> None:
        """Replace the set. Callable from any thread; watchers run later, each on its own loop."""
        with self._lock:
            if names == self._names:
                return
            self._names = names
            watchers = [(loop, changed) for loop, changed in self._watchers if not loop.is_closed()]
            self._watchers = watchers
        for loop, changed in watchers:
            loop.call_soon_threadsafe(changed, names, context=Context())

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` on the running event loop with the current names, then with every later set.

        It runs in an empty context, so that what it starts does not belong to some Serve request.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._watchers.append((loop, changed))
            loop.call_soon(changed, self._names, context=Context())

    def hold(self, name: str) -> None:
        """Keep a replica callable although it drains. Counted: each hold needs its release."""
        with self._lock:
            self._holds[name] = self._holds.get(name, 0) + 1

    def release(self, name: str) -> None:
        with self._lock:
            left = self._holds[name] - 1
            if left:
                self._holds[name] = left
                return
            del self._holds[name]
            released = None if name in self._names else self._released
        if released is not None:
            released()

    def when_released(self, released: Callable[[], None]) -> None:
        """Call `released` whenever a drained replica is held no longer; replaces what was given before."""
        with self._lock:
            self._released = released

    @property
    def held(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._holds)

    def reachable(self, name: str) -> bool:
        """Whether a call by this name can arrive: a candidate, or drained but held."""
        with self._lock:
            return name in self._names or name in self._holds


@functools.cache
def replica_set() -> ReplicaSet:
    """The one set of this process.

    Serve pickles a request router class by value, its module's globals included: a set kept beside the
    class would be a copy. Imported from here, inside a method, it is the same object for everyone.
    """
    return ReplicaSet()
