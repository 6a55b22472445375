"""ReplicaGeneration: one request in flight, whichever replica works on it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from replicas.api import FinishReason, GenerateRequest, TokenDelta
from router.connection import Connection
from router.dispatch import Waiting
from router.errors import ApiError, slow_client
from router.generation import GenerationTimes
from router.measures import TierMeasures
from router.resume import Transcript, without_output

MAX_UNREAD: Final = 16_384
"""Tokens and alternatives of them that may wait for a client that reads more slowly than it is served:
some 3 MB. Whoever is that far behind does not read at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What dispatching must know of a request beside itself."""

    tenant: str
    weight: float
    """Share of the service among the tenants of a tier."""
    hashes: list[int]
    """router.prefix_index.prefix_hashes of the prompt."""


class ReplicaGeneration:
    """See router.generation.Generation. For one consumer.

    A consumer that is slower than its tokens finds them coalesced: what waits here is one delta per
    output. With more than MAX_UNREAD in them the request is ended.
    """

    def __init__(
        self,
        request: GenerateRequest,
        client: Client,
        forget: Callable[["ReplicaGeneration"], None],
        measures: TierMeasures,
    ) -> None:
        """`forget` is called when the consumer aborts what is left of it."""
        self.client = client
        self.request = request
        """The present attempt."""
        self.connection: Connection | None = None
        """Whose replica works on it; None while it waits for one."""
        self.fingerprint: str | None = None
        """Of the replica that began; only an equal one can go on."""
        self.starving_since = 0.0
        """When its tier had begun to starve, as it was sent; loop time."""
        self.predicted_ttft_s: float | None = None
        """As of its arrival; None = not known then."""
        self.num_losses = 0
        """Replicas lost under it."""
        self.refusal: ApiError | None = None
        self.has_begun = False
        """Something of it has come, from whichever replica."""
        self.num_refundable = 0
        """Prompt tokens that its tenant was charged for while nothing of it has come."""
        self.is_withdrawn = False
        """Its present replica was asked to give it back."""
        self._forget = forget
        self._measures = measures
        self._queued_at = 0.0
        self._sent_at: float | None = None
        self.queue_wait_s: float | None = None
        self._num_late = 0  # tokens and alternatives that came while earlier ones of their output waited
        self._transcript = Transcript(request.indexes)
        self._waiting: dict[int, TokenDelta] = {}  # by output index, oldest first
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
        if not self._waiting:
            self._num_late = 0
        self._num_unread -= delta.finish_reason is not None
        return delta

    @property
    def times(self) -> GenerationTimes:
        return GenerationTimes(self._queued_at, self._sent_at)

    @property
    def has_ended(self) -> bool:
        """Every output has its finish."""
        return not self._transcript.running

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far by the unfinished outputs."""
        return self._transcript.num_tokens

    def as_waiting(self, now: float) -> Waiting:
        """Describe what is left of it to the dispatcher."""
        self._queued_at, self._sent_at = now, None
        request = self.request
        return Waiting(
            key=request.request_id,
            tenant=self.client.tenant,
            tier=request.tier,
            num_outputs=request.num_outputs,
            num_tokens=len(request.prompt_ids) + sum(map(len, request.resumed_output_ids)),
            max_tokens=request.sampling.max_tokens,
            queued_at=now,
            weight=self.client.weight,
        )

    def fits(self, connection: Connection) -> bool:
        """Whether a replica has room for what is left of this request, and may go on with it."""
        room, card = connection.room(self.request.tier), connection.card
        if room is None or card is None or card.fingerprint != self.fingerprint:
            return False
        blocks = self.request.num_blocks(card.block_size) + self.num_tokens // card.block_size + 1
        return room.num_outputs >= self.request.num_outputs and room.num_blocks >= blocks

    def could_start_on(self, other: Connection) -> bool:
        """Whether a replica that it was not sent to could start it at once."""
        is_ready = other.num_ready_seats >= self.request.num_outputs
        return other is not self.connection and is_ready and self.fits(other)

    def send_to(self, connection: Connection, fingerprint: str, starved_s: float, now: float) -> None:
        """Note whose replica works on it from now on; `starved_s` is what aging counts there."""
        self._sent_at = now
        self.starving_since = now - starved_s
        if not self.has_begun:
            self.queue_wait_s = now - self._queued_at
            self._measures.queue_wait_ms.observe(self.queue_wait_s * 1e3)
        self.connection = connection
        self.fingerprint = fingerprint
        self.request = msgspec.structs.replace(self.request, waited_s=starved_s)

    def push(self, delta: TokenDelta) -> None:
        """Hand a delta of the present attempt to the consumer."""
        if not self.has_begun and delta.token_ids and self._sent_at is not None:
            now = asyncio.get_running_loop().time()
            self._measures.replica_ttft_ms.observe((now - self._sent_at) * 1e3)
        self.has_begun = True
        self._transcript.take(delta)
        waiting = self._waiting.get(delta.index)
        if waiting is None:
            self._waiting[delta.index] = delta
        else:
            self._num_late += _size(delta)
            waiting.append(delta)
            if self._num_late > MAX_UNREAD and self.refusal is None:
                self.refusal = slow_client()
                self._forget(self)
                self.fail(self.refusal.message)
        self._arrived.set()

    def fail(self, error: str) -> None:
        """End every unfinished output with `error`."""
        attempt = self.request.attempt
        for index in self._transcript.running:
            self.push(
                TokenDelta(self.request.request_id, attempt, index, [], FinishReason.ERROR, error=error)
            )

    def begin_attempt(self) -> None:
        """Make `request` the one that goes on where the last delta ended."""
        self.request = self._transcript.next_attempt(self.request)
        self.connection = None
        self.is_withdrawn = False

    def abort(self, index: int | None = None) -> None:
        if index is None:
            self._forget(self)
            self._waiting.clear()
            self._num_unread = 0
        elif index in self._transcript.running:
            self._abort_running(index)
        elif self._waiting.pop(index, None) is not None:  # its finish, unread
            self._num_unread -= 1
        self._arrived.set()

    def _abort_running(self, index: int) -> None:
        self._transcript.drop(index)
        self._waiting.pop(index, None)
        self._num_unread -= 1
        if self.has_ended:
            self._forget(self)
        elif self.connection is not None:
            self.connection.abort(self.request.request_id, index)
        else:
            self.request = without_output(self.request, index)


def _size(delta: TokenDelta) -> int:
    return len(delta.token_ids) + sum(len(entry.top) for entry in delta.logprobs or ())
