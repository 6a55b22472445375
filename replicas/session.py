"""Session: one router epoch on a replica: its commands in order, its open requests, its frames, its lease."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from replicas.api import (
    LEASE_GRACE_S,
    LEASE_S,
    MAX_UNACKED_S,
    REOPEN_S,
    Abort,
    Command,
    CommandBatch,
    GenerateRequest,
    Submit,
    TokenDelta,
    Withdraw,
)
from replicas.credits import Account, CreditBook
from replicas.effects import AbortRequest, AddRequest, Delivery, Effects, EngineCommand, WithdrawRequest
from replicas.frames import FrameWindow
from replicas.tombstones import Tombstones

MAX_EARLY_COMMANDS: Final = 1024
"""Commands this far ahead are kept until the missing ones arrive; their sender repeats those beyond."""
FEW_SEATS: Final = 8
"""A router that was told of fewer free seats hears of every further one: it would refuse in vain."""


@dataclass(slots=True)
class _OpenRequest:
    attempt: int
    tier: int
    indexes: set[int]
    """Outputs that have not finished."""


class Session:
    """One router epoch. Pure, as all of replicas/sessions.py."""

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
        self._closed = Tombstones[int]()

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
