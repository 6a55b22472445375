"""Sessions: a replica's side of the wire contract (replicas/api.py), for all its routers.

Pure and single-threaded: the clock comes as an argument, nothing here blocks, and whatever is to be done
comes back as `Effects`. The shell around it (replicas/pump.py) holds one lock around every call and, after
each, hands `commands` to the engine and `deliveries` to its open generators, in order:

    subscribe(key, message, now)   a router opened a step stream; `key` is the shell's name for it
    unsubscribe(key)               that stream's consumer went away
    apply(batch, now)              a command batch arrived -> reply, and effects
    publish(outputs, load, ...)    an engine step ended; `outputs` by owner
    expire(now)                    call it several times a second, also when idle

The engine sees a router epoch as `owner`, and requests as (owner, request_id). It reports everything
about a request as TokenDeltas, a refused one too: one delta with finish_reason `error` per index.
After an AbortRequest it may still report deltas of what was dropped; they go no further.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from replicas.api import (
    LEASE_GRACE_S,
    LEASE_S,
    MAX_UNACKED_S,
    REOPEN_S,
    Abort,
    BatchReply,
    Command,
    CommandBatch,
    Credits,
    GenerateRequest,
    ReplicaLoad,
    Submit,
    Subscribe,
    TokenDelta,
    Withdraw,
)
from replicas.credits import Account, Capacity, CreditBook
from replicas.frames import FrameWindow
from replicas.tombstones import Tombstones

MAX_EARLY_COMMANDS: Final = 1024
"""Commands this far ahead are kept until the missing ones arrive; their sender repeats those beyond."""
MAX_TOMBSTONES: Final = 8192
TOMBSTONE_S: Final = 60.0
FEW_SEATS: Final = 8
"""A router that was told of fewer free seats hears of every further one: it would refuse in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """For the engine: start this request. Never given twice for one (owner, request id, attempt)."""

    owner: str
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """For the engine: drop all sequences of this request, or one. They may have ended there already."""

    owner: str
    request_id: int
    attempt: int
    index: int | None = None
    """Output index; None = all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawRequest:
    """For the engine: drop this request if it has not started, and finish its outputs with `abort`."""

    owner: str
    request_id: int
    attempt: int
    indexes: tuple[int, ...]


EngineCommand = AddRequest | AbortRequest | WithdrawRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Frames for one open subscription, in order; `ended` closes it after them."""

    subscription: int
    frames: list[bytes]
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What the shell must do now, in order."""

    commands: list[EngineCommand] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of a command batch."""

    reply: BatchReply
    effects: Effects


@dataclass(slots=True)
class _OpenRequest:
    attempt: int
    tier: int
    indexes: set[int]
    """Outputs that have not finished."""


class _Session:
    """One router epoch: its commands in order, its open requests, its frames, its lease."""

    def __init__(
        self, router_id: str, epoch: int, replica_epoch: int, credit_book: CreditBook, now: float
    ) -> None:
        self.router_id = router_id
        self.epoch = epoch
        self.owner = f"{router_id}:{epoch}"
        self.window = FrameWindow(replica_epoch)
        self.subscription: int | None = None
        self.subscribe_number = 0
        self.heard_at = now
        self.applied = 0
        self.open: dict[int, _OpenRequest] = {}
        self.account = Account()
        self.granted = 0
        """Outputs granted with the last message."""
        self.free_seats: dict[int, int] = {}
        """By tier, as of the last message."""
        self._credit_book = credit_book
        self._early: dict[int, Command] = {}
        self._reopened_after: int | None = None
        self._closed = Tombstones[int](max_entries=MAX_TOMBSTONES, max_age_s=TOMBSTONE_S)

    def apply(self, batch: CommandBatch, now: float) -> list[EngineCommand]:
        """Apply what is next in order, keep what is early, ignore what is known."""
        for number, command in enumerate(batch.commands, batch.first_number):
            if self.applied < number <= self.applied + MAX_EARLY_COMMANDS:
                self._early[number] = command
        commands: list[EngineCommand] = []
        while self.applied + 1 in self._early:
            self.applied += 1
            command = self._early.pop(self.applied)
            if isinstance(command, Submit):
                self._credit_book.submitted(self.account, command.request)
                commands += self._submit(command.request, now)
            elif isinstance(command, Abort):
                commands += self._abort(command, now)
            else:
                commands += self._withdraw(command)
        return commands

    def _submit(self, request: GenerateRequest, now: float) -> list[EngineCommand]:
        request_id, attempt = request.request_id, request.attempt
        if self._closed.covers(request_id, attempt):
            return []
        commands: list[EngineCommand] = []
        running = self.open.get(request_id)
        if running is not None:
            if running.attempt >= attempt:
                return []
            commands += self._abort(Abort(request_id, running.attempt), now)
        self.open[request_id] = _OpenRequest(attempt, request.tier, set(request.indexes))
        self.account.num_open[request.tier] += request.num_outputs
        commands.append(AddRequest(owner=self.owner, request=request))
        return commands

    def _abort(self, abort: Abort, now: float) -> list[EngineCommand]:
        if abort.index is not None:
            return self._abort_output(abort, abort.index, now)
        self._closed.bury(abort.request_id, abort.attempt, now)
        running = self.open.get(abort.request_id)
        if running is None or running.attempt > abort.attempt:
            return []
        del self.open[abort.request_id]
        self.account.num_open[running.tier] -= len(running.indexes)
        return [AbortRequest(owner=self.owner, request_id=abort.request_id, attempt=running.attempt)]

    def _abort_output(self, abort: Abort, index: int, now: float) -> list[EngineCommand]:
        """End one output; the request ends with its last one."""
        request_id, attempt = abort.request_id, abort.attempt
        running = self.open.get(request_id)
        if running is None or running.attempt != attempt or index not in running.indexes:
            return []
        self._close_output(request_id, running, index, now)
        return [AbortRequest(owner=self.owner, request_id=request_id, attempt=attempt, index=index)]

    def _close_output(self, request_id: int, request: _OpenRequest, index: int, now: float) -> None:
        request.indexes.remove(index)
        self.account.num_open[request.tier] -= 1
        if not request.indexes:
            del self.open[request_id]
            self._closed.bury(request_id, request.attempt, now)

    def _withdraw(self, withdraw: Withdraw) -> list[EngineCommand]:
        """Pass it on: only the engine knows what has started, and its deltas close what has not."""
        request_id, attempt = withdraw.request_id, withdraw.attempt
        running = self.open.get(request_id)
        if running is None or running.attempt != attempt:
            return []
        indexes = tuple(sorted(running.indexes))
        return [WithdrawRequest(owner=self.owner, request_id=request_id, attempt=attempt, indexes=indexes)]

    def keep_wanted(self, deltas: list[TokenDelta], now: float) -> list[TokenDelta]:
        """Drop deltas of outputs that are not open, and close the outputs that finish."""
        wanted = []
        for delta in deltas:
            request = self.open.get(delta.request_id)
            if request is None or request.attempt != delta.attempt or delta.index not in request.indexes:
                continue
            wanted.append(delta)
            if delta.finish_reason is not None:
                self._close_output(delta.request_id, request, delta.index, now)
        return wanted

    def misjudges(self, free_seats: Mapping[int, int]) -> bool:
        """The last message told of few free seats, and there are more."""
        return any(told < min(free_seats[tier], FEW_SEATS) for tier, told in self.free_seats.items())

    def detach(self) -> list[Delivery]:
        """End the subscription, if there is one. Deltas wait from now on."""
        self.window.connected = False
        if self.subscription is None:
            return []
        ended = Delivery(subscription=self.subscription, frames=[], ended=True)
        self.subscription = None
        return [ended]

    def end(self) -> Effects:
        """Give up everything: commands that abort the engine's work for this epoch."""
        commands: list[EngineCommand] = [
            AbortRequest(owner=self.owner, request_id=request_id, attempt=request.attempt)
            for request_id, request in self.open.items()
        ]
        self.open.clear()
        return Effects(commands=commands, deliveries=self.detach())

    def is_over(self, now: float) -> bool:
        """The router is silent beyond lease and grace, or does not take what we have for it."""
        silent_s = now - self.heard_at
        return silent_s > LEASE_S + LEASE_GRACE_S or self.window.stalled_s(now) > MAX_UNACKED_S

    def must_reopen(self, now: float) -> bool:
        """The frames after an acknowledged one seem to be lost. True once for each of these numbers."""
        acked = self.window.acked
        if self.window.stalled_s(now) <= REOPEN_S or self._reopened_after == acked:
            return False
        self._reopened_after = acked
        return True


class Sessions:
    """All routers of one replica; see the top of this file for the calls and their order."""

    def __init__(self, replica_epoch: int, capacity: Capacity) -> None:
        self._replica_epoch = replica_epoch
        self._credit_book = CreditBook(capacity)
        self._num_credits = 0
        self._sessions: dict[str, _Session] = {}  # by router id: the current epoch
        self._by_owner: dict[str, _Session] = {}
        self._ended = Tombstones[str](max_entries=MAX_TOMBSTONES, max_age_s=TOMBSTONE_S)
        self._load = ReplicaLoad()
        self._sent_at = 0.0

    @property
    def num_open_requests(self) -> int:
        """Requests that some router still waits for."""
        return sum(len(session.open) for session in self._by_owner.values())

    def subscribe(self, key: int, message: Subscribe, now: float) -> Effects:
        """Open a step stream under the shell's `key`, unused so far. May end it again at once."""
        effects = Effects()
        session = self._enter(message.router_id, message.router_epoch, effects, now)
        if session is None or message.number <= session.subscribe_number:
            effects.deliveries.append(Delivery(subscription=key, frames=[], ended=True))
            return effects
        effects.deliveries.extend(session.detach())
        session.subscription = key
        session.subscribe_number = message.number
        frames = session.window.connect(message.received_frame, now)
        if frames is None:
            self._end(session, effects, now)
        else:
            frames += session.window.flush(self._load, self._sent_at, self._credits(session))
            self._deliver(session, frames, effects)
        return effects

    def unsubscribe(self, key: int) -> None:
        """The stream's consumer went away or cancelled it. Unknown and former keys are fine."""
        for session in self._by_owner.values():
            if session.subscription == key:
                session.detach()

    def apply(self, batch: CommandBatch, now: float) -> Applied:
        """Take a command batch or ping."""
        effects = Effects()
        session = self._enter(batch.router_id, batch.router_epoch, effects, now)
        if session is None:
            reply = BatchReply(
                replica_epoch=self._replica_epoch, applied_through=0, ended=True, load=self._load
            )
            return Applied(reply=reply, effects=effects)
        effects.commands.extend(session.apply(batch, now))
        session.account.declare(batch.demand)
        session.window.acknowledge(batch.acked_frame, now)
        credits = self._credits(session)
        self._deliver(session, session.window.flush(self._load, self._sent_at, credits), effects)
        reply = BatchReply(
            replica_epoch=self._replica_epoch,
            applied_through=session.applied,
            load=self._load,
            credits=credits,
        )
        return Applied(reply=reply, effects=effects)

    def publish(
        self, outputs: Mapping[str, list[TokenDelta]], load: ReplicaLoad, now: float, sent_at: float
    ) -> Effects:
        """Send a step's deltas, by owner, to their routers. Takes over the deltas and their lists.

        `sent_at` is wall-clock time. With no outputs it only updates the load that replies carry.
        O(deltas), plus encoding: runs once per engine step.
        """
        self._load = load
        self._sent_at = sent_at
        self._credit_book.report(load)
        effects = Effects()
        wanted_by_owner = {
            owner: session.keep_wanted(outputs.get(owner, []), now)
            for owner, session in self._by_owner.items()
        }
        accounts = self._accounts()
        free_seats = self._credit_book.free_seats(accounts)
        for owner, wanted in wanted_by_owner.items():
            session = self._by_owner[owner]
            # A router without outputs here hears of nothing: it would wait for its next ping, or refuse.
            is_news = session.misjudges(free_seats)
            if not wanted and not is_news and not session.account.demand.total():
                continue
            granted = session.granted
            credits = self._granted(session, accounts, free_seats)
            if wanted or is_news or session.granted > granted:
                frames = session.window.push(wanted, load, sent_at, now, credits)
                self._deliver(session, frames, effects)
        return effects

    def expire(self, now: float) -> Effects:
        """End subscriptions whose lease is lost, and the epochs of routers that are gone or stuck."""
        effects = Effects()
        for session in list(self._by_owner.values()):
            if session.is_over(now):
                self._end(session, effects, now)
            elif now - session.heard_at > LEASE_S or session.must_reopen(now):
                effects.deliveries.extend(session.detach())
        self._ended.expire(now)
        return effects

    def _enter(self, router_id: str, epoch: int, effects: Effects, now: float) -> _Session | None:
        """Find or begin the session of a router epoch and renew its lease; None when it is over."""
        if self._ended.covers(router_id, epoch):
            return None
        session = self._sessions.get(router_id)
        if session is not None and epoch < session.epoch:
            return None
        if session is not None and epoch > session.epoch:
            self._end(session, effects, now)
            session = None
        if session is None:
            session = _Session(router_id, epoch, self._replica_epoch, self._credit_book, now)
            self._sessions[router_id] = self._by_owner[session.owner] = session
        session.heard_at = now
        return session

    def _end(self, session: _Session, effects: Effects, now: float) -> None:
        del self._sessions[session.router_id], self._by_owner[session.owner]
        self._ended.bury(session.router_id, session.epoch, now)
        ended = session.end()
        effects.commands.extend(ended.commands)
        effects.deliveries.extend(ended.deliveries)

    def _accounts(self) -> list[Account]:
        return [session.account for session in self._by_owner.values()]

    def _credits(self, session: _Session) -> Credits:
        accounts = self._accounts()
        return self._granted(session, accounts, self._credit_book.free_seats(accounts))

    def _granted(
        self, session: _Session, accounts: Collection[Account], free_seats: dict[int, int]
    ) -> Credits:
        """Draw up credits, and remember what the router is told with them."""
        tiers = self._credit_book.grant(session.account, accounts)
        session.granted = max(credit.num_outputs for credit in tiers)
        session.free_seats = free_seats
        self._num_credits += 1
        return Credits(self._num_credits, tiers)

    @staticmethod
    def _deliver(session: _Session, frames: list[bytes], effects: Effects) -> None:
        if frames and session.subscription is not None:
            effects.deliveries.append(Delivery(subscription=session.subscription, frames=frames))
