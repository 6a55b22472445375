"""How bytes travel between a router and its replicas: the carrier under router/streams.py.

The carrier may lose, repeat and delay; order, identity and liveness are the business of the streams.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol


class ReplicaGoneError(Exception):
    """The replica is not among those the carrier can reach, or died during the call."""


class FrameStream(Protocol):
    """An open subscription: encoded StepOutputs in the order in which the replica sent them."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield frames; ends when the replica closes the stream. Raises ReplicaGoneError."""
        ...

    def cancel(self) -> None:
        """Tell the replica to end the stream. Dropping the object does not."""
        ...


class Transport(Protocol):
    """Carries encoded messages (replicas/api.py, msgpack) to replicas by name."""

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` on the event loop with the names of all candidate replicas, now and at each
        change. A draining or dead replica leaves the set; a draining one can still be called."""
        ...

    async def card(self, replica: str) -> bytes:
        """Fetch the replica's ModelCard. Raises ReplicaGoneError."""
        ...

    async def send(self, replica: str, batch: bytes) -> bytes:
        """Deliver a CommandBatch, return the BatchReply. Raises ReplicaGoneError, TimeoutError."""
        ...

    def subscribe(self, replica: str, subscribe: bytes) -> FrameStream:
        """Open the step stream (a Subscribe message)."""
        ...
