"""VirtualTransport: messages between a router and virtual replicas, which start, drain and die."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from cluster.simulation.frame_queue import FrameQueue
from cluster.simulation.replica import VirtualReplica
from router.transport import FrameStream, ReplicaGoneError


class VirtualTransport:
    """Implements router.transport.Transport; every message takes `delay_s`.

    Replicas missing from `replicas` are dead. One router's view of who may be given work is what it was
    last told with `tell`, at first all there are.
    """

    def __init__(self, replicas: Mapping[str, VirtualReplica], delay_s: float) -> None:
        self._replicas = replicas
        self._delay_s = delay_s
        self._changed: Callable[[frozenset[str]], None] = lambda _: None

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        self._changed = changed
        asyncio.get_running_loop().call_soon(changed, frozenset(self._replicas))

    def tell(self, candidates: frozenset[str]) -> None:
        """Let the router know who may be given work now."""
        self._changed(candidates)

    async def card(self, replica: str) -> bytes:
        return msgspec.msgpack.encode(self._reach(replica).card)

    async def send(self, replica: str, batch: bytes) -> bytes:
        await asyncio.sleep(self._delay_s)
        reply = self._reach(replica).apply(batch)
        await asyncio.sleep(self._delay_s)
        return reply

    def subscribe(self, replica: str, subscribe: bytes) -> FrameStream:
        stream = FrameQueue()
        if replica in self._replicas:
            self._replicas[replica].open(stream, subscribe)
        else:
            stream.put(None)
        return stream

    def _reach(self, replica: str) -> VirtualReplica:
        if replica not in self._replicas:
            raise ReplicaGoneError(replica)
        return self._replicas[replica]
