"""ReplicaStreams: a router's side of the wire contract (replicas/api.py), for one epoch on one replica.

Pure: no clock, no I/O. The shell (router/connection.py) carries the messages and says how that went.
"""

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from replicas.api import (
    MAX_UNACKED_FRAMES,
    Abort,
    BatchReply,
    Command,
    CommandBatch,
    Credits,
    FinishReason,
    GenerateRequest,
    ReplicaLoad,
    StepOutputs,
    Submit,
    Subscribe,
    TierDemand,
    TokenDelta,
    Withdraw,
)

MAX_LOST_BATCHES: Final = 4
"""So many lost batches in a row, without a command applied between them, end the epoch."""
ACK_FRAMES: Final = MAX_UNACKED_FRAMES // 4
"""Acknowledge after so many frames, if no batch does it before: the replica must not have to coalesce."""


class EpochOverError(Exception):
    """The replica's state for this epoch is lost or in doubt; the message says why. Fail its streams."""


class SubscriptionBrokenError(Exception):
    """A frame is missing: subscribe again, and the replica repeats what did not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What may be submitted to a replica now, of one tier."""

    num_outputs: int
    num_blocks: int


@dataclass(slots=True)
class _OpenRequest:
    attempt: int
    indexes: set[int]
    """Outputs without a finish so far."""


class ReplicaStreams:
    """Numbers commands, repeats lost ones, puts frames in order, and knows which outputs are open."""

    def __init__(self, router_id: str, epoch: int, replica_epoch: int, block_size: int) -> None:
        self.load = ReplicaLoad()
        """The replica's last report."""
        self.num_outputs = 0
        """Open outputs of this router on the replica."""
        self.is_confirmed = False
        """The replica has answered a batch of this epoch and says that it is well."""
        self.is_demanding = False
        """The last batch taken said that requests wait for this replica's credits."""
        self._block_size = block_size
        self._credits = Credits()
        self._num_submitted: Counter[int] = Counter()  # outputs of all submits of this epoch, by tier
        self._submitted_blocks: Counter[int] = Counter()
        self._router_id = router_id
        self._epoch = epoch
        self._replica_epoch = replica_epoch
        self._open: dict[int, _OpenRequest] = {}
        self._applied = 0
        self._unapplied: deque[Command] = deque()  # commands _applied + 1, _applied + 2, ...
        self._num_sent = 0  # leading entries of _unapplied that are under way
        self._num_calls = 0  # batches without reply so far
        self._num_lost = 0
        self._received = 0
        self._acked = 0
        self._subscribe_number = 0
        self._num_foreign = 0

    @property
    def num_busy(self) -> int:
        """Outputs on the replica: our own, known exactly, and those of others as last reported."""
        return self.num_outputs + self._num_foreign

    @property
    def is_quiet(self) -> bool:
        """No output is open and the replica has applied every command."""
        return not self._open and not self._unapplied

    @property
    def wants_batch(self) -> bool:
        """There is something to send that should not wait for the next ping."""
        return len(self._unapplied) > self._num_sent or self._received - self._acked >= ACK_FRAMES

    def submit(self, request: GenerateRequest) -> None:
        """Open the outputs of `request`. Its request id must not be open in this epoch."""
        assert request.request_id not in self._open, f"request id {request.request_id} is open"
        self._open[request.request_id] = _OpenRequest(request.attempt, set(request.indexes))
        self.num_outputs += len(request.indexes)
        self._unapplied.append(Submit(request))
        self._num_submitted[request.tier] += request.num_outputs
        self._submitted_blocks[request.tier] += request.num_blocks(self._block_size)

    def room(self, tier: int) -> Room:
        """What the replica grants for this tier, less what it was sent since."""
        granted = None
        for credit in self._credits.tiers:
            if credit.tier > tier:
                break
            granted = credit
        if granted is None:
            return Room(num_outputs=0, num_blocks=0)
        return Room(
            num_outputs=granted.num_outputs - _through(tier, self._num_submitted),
            num_blocks=granted.num_blocks - _through(tier, self._submitted_blocks),
        )

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Close what is open of a request, or one output: `receive` and `fail` bring no more of it."""
        request = self._open.get(request_id)
        if request is None:
            return
        ended = set(request.indexes) if index is None else request.indexes & {index}
        if not ended:
            return
        self.num_outputs -= len(ended)
        request.indexes -= ended
        if not request.indexes:
            del self._open[request_id]
        self._unapplied.append(Abort(request_id, request.attempt, index if request.indexes else None))

    def withdraw(self, request_id: int) -> None:
        """Ask for an open request back; if it has not started there, its outputs finish with `abort`."""
        self._unapplied.append(Withdraw(request_id, self._open[request_id].attempt))

    def take_batch(self, demand: tuple[TierDemand, ...] = (), counters: bytes = b"") -> CommandBatch:
        """Return what is to be sent now; a ping if there is nothing. `demand` is what waits for credits,
        `counters` goes along as it is.

        Exactly one call of `replied` or `lost` must follow for every batch taken.
        """
        commands = tuple(islice(self._unapplied, self._num_sent, None))
        batch = CommandBatch(
            router_id=self._router_id,
            router_epoch=self._epoch,
            first_number=self._applied + self._num_sent + 1,
            commands=commands,
            acked_frame=self._received,
            demand=demand,
            counters=counters,
        )
        self.is_demanding = bool(demand)
        self._num_sent = len(self._unapplied)
        self._num_calls += 1
        self._acked = self._received
        return batch

    def replied(self, reply: BatchReply) -> None:
        """Take the reply to a batch of this epoch. Raises EpochOverError."""
        self._num_calls -= 1
        self._check_epoch(reply.replica_epoch)
        if reply.ended:
            raise EpochOverError("the replica ended the epoch")
        if reply.failure is not None:
            raise EpochOverError(f"the replica reports: {reply.failure}")
        self.is_confirmed = True
        if reply.load is not None:
            self._note_report(reply.load, reply.credits)
        num_applied = max(0, reply.applied_through - self._applied)
        for _ in range(num_applied):
            self._unapplied.popleft()
        self._applied += num_applied
        self._num_sent = max(0, self._num_sent - num_applied)
        if num_applied or not self._num_sent:
            self._num_lost = 0
        if self._num_sent and not self._num_calls:
            # The replica dropped or lacks something, and no call that could bring it is left.
            self._repeat(count_as_lost=not num_applied)

    def lost(self) -> None:
        """A batch, or the reply to it, did not arrive. Raises EpochOverError after too many."""
        self._num_calls -= 1
        self._repeat(count_as_lost=True)

    def next_subscribe(self) -> Subscribe:
        """Return the message that opens the step stream, or reopens it where it broke."""
        self._subscribe_number += 1
        return Subscribe(
            router_id=self._router_id,
            router_epoch=self._epoch,
            number=self._subscribe_number,
            received_frame=self._received,
        )

    def receive(self, frame: StepOutputs) -> list[TokenDelta]:
        """Return the new deltas of open outputs, in order. O(deltas).

        Raises SubscriptionBrokenError on a gap, EpochOverError when the replica has started anew.
        """
        self._check_epoch(frame.replica_epoch)
        if frame.number <= self._received:
            return []
        if frame.number > self._received + 1:
            raise SubscriptionBrokenError(f"frame {frame.number} came after frame {self._received}")
        self._received = frame.number
        wanted = [delta for delta in frame.deltas if self._accept(delta)]
        self._note_report(frame.load, frame.credits)
        return wanted

    def fail(self, error: str) -> list[TokenDelta]:
        """Close everything: one finish with `error` for every open output. The epoch is over after it."""
        deltas = [
            TokenDelta(request_id, request.attempt, index, [], FinishReason.ERROR, error=error)
            for request_id, request in self._open.items()
            for index in sorted(request.indexes)
        ]
        self._open.clear()
        self.num_outputs = 0
        return deltas

    def _accept(self, delta: TokenDelta) -> bool:
        request = self._open.get(delta.request_id)
        if request is None or request.attempt != delta.attempt or delta.index not in request.indexes:
            return False
        if delta.finish_reason is not None:
            self.num_outputs -= 1
            request.indexes.remove(delta.index)
            if not request.indexes:
                del self._open[delta.request_id]
        return True

    def _note_report(self, load: ReplicaLoad, credits: Credits) -> None:
        """Take over what is newest: replies and frames travel apart, and frames may come again."""
        if credits.number < self._credits.number:
            return
        self._credits = credits
        self.load = load
        self._num_foreign = max(0, load.num_running + load.num_waiting - self.num_outputs)

    def _check_epoch(self, replica_epoch: int) -> None:
        if replica_epoch != self._replica_epoch:
            raise EpochOverError("the replica has started anew")

    def _repeat(self, *, count_as_lost: bool) -> None:
        """Let the next batch carry every unapplied command; the replica ignores those it knows."""
        self._num_sent = 0
        self._num_lost += count_as_lost
        if self._num_lost >= MAX_LOST_BATCHES:
            raise EpochOverError(f"{self._num_lost} command batches in a row were lost")


def _through(tier: int, by_tier: Counter[int]) -> int:
    """Sum over this tier and the better ones."""
    return sum(amount for other, amount in by_tier.items() if other <= tier)
