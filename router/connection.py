"""Connection: keeps one replica's streams going over a carrier, epoch after epoch. The asyncio shell
of router/streams.py."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import Context
from typing import Any, Final, Literal

import msgspec

from replicas.api import (
    CREDIT_TTL_S,
    PING_INTERVAL_S,
    BatchReply,
    GenerateRequest,
    ModelCard,
    StepOutputs,
    TierDemand,
    TokenDelta,
)
from router.prefix_index import STRIDE_TOKENS, PrefixIndex
from router.routing import Candidate
from router.streams import EpochOverError, ReplicaStreams, Room, SubscriptionBrokenError
from router.transport import FrameStream, ReplicaGoneError, Transport

CALL_TIMEOUT_S: Final = 3.0
"""A batch without a reply for this long counts as lost."""
CARD_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 1.0
"""Pause between two epochs, and after the second subscription in a row that brought nothing."""

ReplicaState = Literal["starting", "running", "draining"]
"""`starting`: listed, but it has not answered yet."""

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(StepOutputs).decode
_decode_reply = msgspec.msgpack.Decoder(BatchReply).decode
_decode_card = msgspec.msgpack.Decoder(ModelCard).decode


class Connection:
    """One replica as a router uses it. All methods belong on the event loop.

    `run` works until the connection is drained. Within it epochs follow each other: each fetches the
    card, subscribes, reads and pings until something is in doubt, and then fails its open outputs.
    """

    def __init__(
        self,
        replica: str,
        transport: Transport,
        router_id: str,
        epochs: Iterator[int],
        *,
        deliver: Callable[[TokenDelta], None],
        fail: Callable[[TokenDelta], None],
        heard: Callable[[], None],
        demand: Callable[[], tuple[TierDemand, ...]],
        counters: Callable[[str], bytes],
    ) -> None:
        """`deliver` gets every delta of the replica, `fail` an error for every output that was open when
        an epoch ended; `heard` is called after every frame and reply: credits may have come. `demand` is
        asked for what waits for credits, `counters` for what the replica of this name is to be told with a
        ping."""
        self.replica = replica
        self.card: ModelCard | None = None
        """As of the current epoch; None while none is open."""
        self.streams: ReplicaStreams | None = None
        """The current epoch; None while none is open."""
        self.draining = False
        self._transport = transport
        self._router_id = router_id
        self._epochs = epochs
        self._deliver = deliver
        self._fail = fail
        self._heard = heard
        self._demand = demand
        self._counters = counters
        self._is_ping_due = False
        self._heard_at = -math.inf
        self._prefixes = PrefixIndex(0)
        self._over: asyncio.Future[None]
        self._tasks: set[asyncio.Task[None]] = set()
        self._will_send = False

    def submit(self, request: GenerateRequest, hashes: Sequence[int]) -> None:
        """Start a request in the current epoch; it leaves with all others of this loop tick."""
        assert self.streams is not None, f"{self.replica} has no open epoch"
        self.streams.submit(request)
        self._prefixes.note(hashes)
        self._send_soon()

    def abort(self, request_id: int, index: int | None = None) -> None:
        """End a request, or one output, if it is open here."""
        if self.streams is not None:
            self.streams.abort(request_id, index)
            self._send_soon()

    def withdraw(self, request_id: int) -> None:
        """Ask for a request back that is open here; it comes as deltas that finish with `abort`."""
        assert self.streams is not None, f"{self.replica} has no open epoch"
        self.streams.withdraw(request_id)
        self._send_soon()

    @property
    def state(self) -> ReplicaState:
        """What the replica is to this router."""
        if self.draining:
            return "draining"
        return "running" if self.streams is not None and self.streams.is_confirmed else "starting"

    @property
    def num_ready_seats(self) -> int:
        """Outputs that could start at once, as far as the last report tells; 0 while somebody waits there."""
        if self.card is None or self.streams is None or self.streams.load.num_waiting:
            return 0
        return self.card.max_num_seqs - self.streams.num_busy

    def num_free_seats(self, tier: int) -> int:
        """Seats that outputs of this tier may find, as far as the last report tells: those of worse tiers
        too where they may be taken, and whether credits say so already or not."""
        if self.card is None or self.streams is None or self.draining:
            return 0
        num_busy = self.streams.num_busy
        if self.card.takes_seats:
            num_busy -= sum(entry.num_running for entry in self.streams.load.tiers if entry.tier > tier)
        return max(0, self.card.max_num_seqs - num_busy)

    def num_own_waiting(self, tier: int) -> float:
        """Outputs of this tier and better ones that wait on the replica, as far as they are ours."""
        if self.streams is None or not self.streams.num_busy:
            return 0.0
        num_waiting = sum(entry.num_waiting for entry in self.streams.load.tiers if entry.tier <= tier)
        return num_waiting * self.streams.num_outputs / self.streams.num_busy

    def has_waiting(self, tier: int) -> bool:
        """The replica says that requests of this tier wait on it."""
        streams = self.streams
        return streams is not None and any(t.tier == tier and t.num_waiting for t in streams.load.tiers)

    def room(self, tier: int, effective_tier: int | None = None) -> Room | None:
        """What may be submitted now; None when nothing, because the replica drains, is new or silent.

        One that has become as good as `effective_tier` by aging has its seats, though it pushes nobody out
        for them: those that were pushed out and wait on the replica would keep it here for long.
        """
        if self.streams is None or self.draining or not self.streams.is_confirmed:
            return None
        if asyncio.get_running_loop().time() - self._heard_at > CREDIT_TTL_S:
            return None
        room = self.streams.room(tier)
        if effective_tier is None or effective_tier >= tier:
            return room
        better = self.streams.room(effective_tier)
        return Room(num_outputs=max(room.num_outputs, better.num_outputs), num_blocks=room.num_blocks)

    def as_candidate(self, hashes: Sequence[int], is_next_to_go: bool) -> Candidate:
        """Describe the replica to routing, for a prompt of these prefix hashes. Needs an open epoch."""
        assert self.streams is not None, f"{self.replica} has no open epoch"
        matched = self._prefixes.match(hashes) / len(hashes) if hashes else 0.0
        return Candidate(
            replica=self.replica,
            num_busy=self.streams.num_busy,
            matched=matched,
            is_next_to_go=is_next_to_go,
        )

    def demand_changed(self) -> None:
        """Tell the replica at once when requests begin, or cease, to wait for its credits."""
        streams = self.streams
        if streams is not None and not self.draining and bool(self._demand()) != streams.is_demanding:
            self._send_soon()

    def set_draining(self, draining: bool) -> None:
        """Whether to end as soon as nothing is open any more."""
        self.draining = draining
        self._end_if_drained()

    async def run(self) -> None:
        """Keep epochs going until drained. Cancelling it fails what is open."""
        while not self.draining:
            try:
                await self._run_epoch()
            except (EpochOverError, ReplicaGoneError, TimeoutError) as error:
                logger.warning("replica %s: epoch ended: %s", self.replica, error or "no answer")
            except Exception:
                # An outermost loop: whatever a carrier raises must not take the replica out of use.
                logger.exception("replica %s: epoch ended by an unexpected error", self.replica)
            else:
                return
            await asyncio.sleep(RETRY_S)

    async def _run_epoch(self) -> None:
        """Return when drained; raise when the epoch is over for another reason."""
        async with asyncio.timeout(CARD_TIMEOUT_S):
            card = _decode_card(await self._transport.card(self.replica))
        streams = ReplicaStreams(self._router_id, next(self._epochs), card.replica_epoch, card.block_size)
        self._over = asyncio.get_running_loop().create_future()
        self._will_send = False
        self.card, self.streams = card, streams
        self._prefixes = PrefixIndex(card.num_blocks * card.block_size // STRIDE_TOKENS)
        try:
            self._start(self._read(streams))
            self._start(self._ping())
            self._end_if_drained()
            await self._over
        finally:
            self.card = self.streams = None
            for delta in streams.fail("the connection to the replica of this request was lost"):
                self._fail(delta)
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, streams: ReplicaStreams) -> None:
        stream = self._subscribe(streams)
        num_fruitless = 0
        try:
            while True:
                num_frames = await self._read_subscription(stream, streams)
                num_fruitless = 0 if num_frames else num_fruitless + 1
                if num_fruitless > 1:
                    await asyncio.sleep(RETRY_S)
                # The new one first: a draining replica is reachable only while we are subscribed to it.
                broken, stream = stream, self._subscribe(streams)
                broken.cancel()
        finally:
            stream.cancel()

    async def _read_subscription(self, stream: FrameStream, streams: ReplicaStreams) -> int:
        """Read until the stream ends or breaks; return the number of frames that it brought."""
        num_frames = 0
        try:
            async for frame in stream:
                for delta in streams.receive(_decode_frame(frame)):
                    self._deliver(delta)
                num_frames += 1
                self._note_heard()
                if streams.wants_batch:
                    self._send_soon()
                self._end_if_drained()
        except SubscriptionBrokenError as error:
            logger.warning("replica %s: %s", self.replica, error)
        return num_frames

    def _subscribe(self, streams: ReplicaStreams) -> FrameStream:
        return self._transport.subscribe(self.replica, _encode(streams.next_subscribe()))

    async def _ping(self) -> None:
        while True:
            self._is_ping_due = True
            self._send_soon()
            await asyncio.sleep(PING_INTERVAL_S)

    def _send_soon(self) -> None:
        """Send a batch in the next loop tick. Batches may overtake each other; numbers restore order."""
        if not self._will_send:
            self._will_send = True
            self._start(self._send())

    async def _send(self) -> None:
        self._will_send = False
        streams = self.streams
        if streams is None:
            return
        counters = self._counters(self.replica) if self._is_ping_due else b""
        self._is_ping_due = False
        batch = _encode(streams.take_batch(() if self.draining else self._demand(), counters))
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await self._transport.send(self.replica, batch)
        except TimeoutError:
            streams.lost()
        else:
            streams.replied(_decode_reply(reply))
            self._note_heard()
        if streams.wants_batch:
            self._send_soon()
        self._end_if_drained()

    def _note_heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._heard()

    def _end_if_drained(self) -> None:
        streams = self.streams
        if self.draining and streams is not None and streams.is_quiet and not self._over.done():
            self._over.set_result(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # An empty context: calls made inside a Serve request would inherit its id and collide in Ray.
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)
