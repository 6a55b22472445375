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
from dataclasses import dataclass

from replicas.api import LEASE_S, BatchReply, CommandBatch, Credits, ReplicaLoad, Subscribe, TokenDelta
from replicas.credits import Account, Capacity, CreditBook
from replicas.effects import Delivery, Effects
from replicas.session import Session
from replicas.tombstones import Tombstones


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of a command batch."""

    reply: BatchReply
    effects: Effects


class Sessions:
    """All routers of one replica; see the top of this file for the calls and their order."""

    def __init__(self, replica_epoch: int, capacity: Capacity) -> None:
        self._replica_epoch = replica_epoch
        self._credit_book = CreditBook(capacity)
        self._num_credits = 0
        self._sessions: dict[str, Session] = {}  # by router id: the current epoch
        self._by_owner: dict[str, Session] = {}
        self._ended = Tombstones[str]()
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

    def _enter(self, router_id: str, epoch: int, effects: Effects, now: float) -> Session | None:
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
            session = Session(router_id, epoch, self._replica_epoch, self._credit_book, now)
            self._sessions[router_id] = self._by_owner[session.owner] = session
        session.heard_at = now
        return session

    def _end(self, session: Session, effects: Effects, now: float) -> None:
        del self._sessions[session.router_id], self._by_owner[session.owner]
        self._ended.bury(session.router_id, session.epoch, now)
        ended = session.end()
        effects.commands.extend(ended.commands)
        effects.deliveries.extend(ended.deliveries)

    def _accounts(self) -> list[Account]:
        return [session.account for session in self._by_owner.values()]

    def _credits(self, session: Session) -> Credits:
        accounts = self._accounts()
        return self._granted(session, accounts, self._credit_book.free_seats(accounts))

    def _granted(
        self, session: Session, accounts: Collection[Account], free_seats: dict[int, int]
    ) -> Credits:
        """Draw up credits, and remember what the router is told with them."""
        tiers = self._credit_book.grant(session.account, accounts)
        session.granted = max(credit.num_outputs for credit in tiers)
        session.free_seats = free_seats
        self._num_credits += 1
        return Credits(self._num_credits, tiers)

    @staticmethod
    def _deliver(session: Session, frames: list[bytes], effects: Effects) -> None:
        if frames and session.subscription is not None:
            effects.deliveries.append(Delivery(subscription=session.subscription, frames=frames))
