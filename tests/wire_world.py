"""A replica and its routers over a carrier that does what the test says: both real cores, a fake engine."""

from dataclasses import dataclass, field

import msgspec

from replicas.api import (
    BatchReply,
    CommandBatch,
    FinishReason,
    GenerateRequest,
    ReplicaLoad,
    SamplingParams,
    StepOutputs,
    Subscribe,
    TokenDelta,
    TokenLogprobs,
)
from replicas.credits import Capacity
from replicas.effects import AbortRequest, Effects, EngineCommand, WithdrawRequest
from replicas.pump import withdrawal
from replicas.sessions import Sessions
from router.streams import EpochOverError, ReplicaStreams, SubscriptionBrokenError

CAPACITY = Capacity(max_num_seqs=8, block_size=16)

encode = msgspec.msgpack.encode


def make_request(
    request_id: int, *, attempt: int = 0, n: int = 1, max_tokens: int = 3, logprobs: int | None = None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs),
        indexes=tuple(range(n)),
    )


def expected_token(request_id: int, attempt: int, index: int, position: int) -> int:
    return ((request_id * 8 + attempt) * 8 + index) * 4096 + position


class FakeEngine:
    """One known token per open output and step. Refuses what Sessions must never ask for."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], tuple[GenerateRequest, dict[int, int]]] = {}
        self.num_steps = 0
        self._seen: set[tuple[str, int, int]] = set()
        self._fresh: set[tuple[str, int]] = set()  # no step has seen them
        self._withdrawn: dict[tuple[str, int], WithdrawRequest] = {}

    def carry_out(self, command: EngineCommand) -> None:
        if isinstance(command, WithdrawRequest):
            if (command.owner, command.request_id) in self._fresh:
                self._withdrawn[command.owner, command.request_id] = command
            return
        if isinstance(command, AbortRequest):
            running = self.requests.get((command.owner, command.request_id))
            if running is not None and running[0].attempt == command.attempt:
                positions = running[1]
                for index in list(positions) if command.index is None else [command.index]:
                    positions.pop(index, None)
                if not positions:
                    del self.requests[command.owner, command.request_id]
            return
        request = command.request
        identity = (command.owner, request.request_id, request.attempt)
        assert identity not in self._seen, f"{identity} was started twice"
        assert (command.owner, request.request_id) not in self.requests, f"{identity} runs twice"
        self._seen.add(identity)
        self._fresh.add((command.owner, request.request_id))
        self._withdrawn.pop((command.owner, request.request_id), None)
        resumed = request.resumed_output_ids or ((),) * len(request.indexes)
        positions = {index: len(ids) for index, ids in zip(request.indexes, resumed, strict=True)}
        self.requests[command.owner, request.request_id] = (request, positions)

    def step(self) -> dict[str, list[TokenDelta]]:
        self.num_steps += 1
        outputs: dict[str, list[TokenDelta]] = {}
        for key, command in self._withdrawn.items():
            if self.requests.pop(key, None) is not None:
                outputs.setdefault(command.owner, []).extend(withdrawal(command))
        self._withdrawn.clear()
        self._fresh.clear()
        for (owner, request_id), (request, positions) in list(self.requests.items()):
            for index, position in list(positions.items()):
                delta = self._make_delta(request, index, position)
                outputs.setdefault(owner, []).append(delta)
                positions[index] += 1
                if delta.finish_reason is not None:
                    del positions[index]
            if not positions:
                del self.requests[owner, request_id]
        return outputs

    def _make_delta(self, request: GenerateRequest, index: int, position: int) -> TokenDelta:
        token = expected_token(request.request_id, request.attempt, index, position)
        is_last = position + 1 == request.sampling.max_tokens
        return TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            token_ids=[token],
            finish_reason=FinishReason.LENGTH if is_last else None,
            logprobs=None if request.sampling.logprobs is None else [TokenLogprobs(-float(token))],
            num_cached_tokens=0 if position == 0 else None,
        )


@dataclass
class Output:
    """What a client saw of one output."""

    request: GenerateRequest
    index: int
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    is_aborted: bool = False

    def take(self, delta: TokenDelta) -> None:
        request = self.request
        assert not self.is_aborted, "a delta after the abort"
        assert self.finish_reason is None, "a delta after the finish"
        assert delta.attempt == request.attempt
        for token in delta.token_ids:
            position = len(self.token_ids)
            assert token == expected_token(request.request_id, request.attempt, self.index, position)
            self.token_ids.append(token)
        if request.sampling.logprobs is not None and delta.finish_reason is not FinishReason.ERROR:
            assert [entry.logprob for entry in delta.logprobs or ()] == [-float(t) for t in delta.token_ids]
        if delta.num_cached_tokens is not None:
            assert self.num_cached_tokens is None
            self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is FinishReason.ABORT:
            assert not self.token_ids, "taken back after it had started"
        if delta.finish_reason is FinishReason.LENGTH:
            assert len(self.token_ids) == request.sampling.max_tokens
            assert self.num_cached_tokens == 0


@dataclass
class Call:
    """A command batch under way."""

    streams: ReplicaStreams
    batch: bytes
    reply: bytes | None = None


@dataclass
class Subscription:
    """A step stream as the carrier sees it."""

    message: bytes
    key: int | None = None
    """The replica's key for it once the message arrived."""
    frames: list[bytes] = field(default_factory=list)
    is_ended: bool = False


class Router:
    """Does what router/connection.py does, one call at a time."""

    def __init__(self, name: str, epoch: int, replica_epoch: int) -> None:
        self.name = name
        self.outputs: dict[tuple[int, int], Output] = {}
        self.calls: list[Call] = []
        self.num_failed_epochs = 0
        self.num_lost = 0
        self.begin(epoch, replica_epoch)

    def begin(self, epoch: int, replica_epoch: int) -> None:
        self.epoch = epoch
        self.streams = ReplicaStreams(self.name, epoch, replica_epoch, CAPACITY.block_size)
        self.calls = []
        self.subscribe()

    def subscribe(self) -> None:
        self.subscription = Subscription(encode(self.streams.next_subscribe()))

    def submit(self, request: GenerateRequest) -> None:
        for index in request.indexes:
            self.outputs[request.request_id, index] = Output(request, index)
        self.streams.submit(request)

    def abort(self, request_id: int, index: int | None = None) -> None:
        for (output_request_id, output_index), output in self.outputs.items():
            if output_request_id == request_id and index in (None, output_index):
                output.is_aborted = True
        self.streams.abort(request_id, index)

    def withdraw(self, request_id: int) -> None:
        self.streams.withdraw(request_id)

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.outputs[delta.request_id, delta.index].take(delta)

    def open_outputs(self) -> list[Output]:
        return [o for o in self.outputs.values() if o.finish_reason is None and not o.is_aborted]


class World:
    """One replica, some routers, and everything that is under way between them."""

    def __init__(self, num_routers: int) -> None:
        self.now = 1000.0
        self.replica_epoch = 1
        self.epochs = iter(range(1, 1 << 30))
        self.keys = iter(range(1 << 30))
        self.engine = FakeEngine()
        self.sessions = Sessions(self.replica_epoch, CAPACITY)
        self.by_key: dict[int, Subscription] = {}
        self.late_batches: list[bytes] = []
        self.late_subscriptions: list[bytes] = []
        self.routers = [Router(f"r{i}", next(self.epochs), 1) for i in range(num_routers)]

    def carry_out(self, effects: Effects) -> None:
        for command in effects.commands:
            self.engine.carry_out(command)
        for delivery in effects.deliveries:
            subscription = self.by_key[delivery.subscription]
            assert not subscription.is_ended, "frames after the end"
            subscription.frames += delivery.frames
            subscription.is_ended = delivery.ended

    def step(self) -> None:
        load = ReplicaLoad(num_running=len(self.engine.requests))
        self.carry_out(self.sessions.publish(self.engine.step(), load, self.now, 0.0))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.sessions.expire(self.now))

    def send(self, router: Router) -> None:
        router.calls.append(Call(router.streams, encode(router.streams.take_batch())))

    def apply(self, batch: bytes) -> bytes:
        applied = self.sessions.apply(msgspec.msgpack.decode(batch, type=CommandBatch), self.now)
        self.carry_out(applied.effects)
        return encode(applied.reply)

    def finish_call(self, router: Router, call: Call) -> None:
        """The reply arrives if there is one, else the call is lost."""
        router.calls.remove(call)
        try:
            if call.reply is None:
                call.streams.lost()
            else:
                call.streams.replied(msgspec.msgpack.decode(call.reply, type=BatchReply))
        except EpochOverError:
            self.end_epoch(router)

    def open_subscription(self, subscription: Subscription) -> None:
        """The Subscribe message arrives."""
        subscription.key = next(self.keys)
        self.by_key[subscription.key] = subscription
        message = msgspec.msgpack.decode(subscription.message, type=Subscribe)
        self.carry_out(self.sessions.subscribe(subscription.key, message, self.now))

    def receive(self, router: Router, position: int = 0) -> None:
        """One frame arrives, not necessarily the next; or the end of the stream, when none is left."""
        subscription = router.subscription
        if not subscription.frames:
            if subscription.is_ended:
                self.reopen(router)
            return
        frame = subscription.frames.pop(position)
        try:
            router.take(router.streams.receive(msgspec.msgpack.decode(frame, type=StepOutputs)))
        except SubscriptionBrokenError:
            self.reopen(router)
        except EpochOverError:
            self.end_epoch(router)

    def reopen(self, router: Router) -> None:
        self._drop_subscription(router)
        router.subscribe()

    def end_epoch(self, router: Router) -> None:
        self._drop_subscription(router)
        self.late_batches += [call.batch for call in router.calls]
        router.take(router.streams.fail("lost"))
        router.num_failed_epochs += 1
        router.begin(next(self.epochs), self.replica_epoch)

    def restart_router(self, router: Router) -> None:
        """The router dies with its clients; nothing tells the replica."""
        self.late_batches += [call.batch for call in router.calls]
        self.routers[self.routers.index(router)] = Router(router.name, next(self.epochs), self.replica_epoch)

    def restart_replica(self) -> None:
        """The replica loses all state; its streams end."""
        for subscription in self.by_key.values():
            subscription.is_ended = True
        self.by_key.clear()
        self.replica_epoch += 1
        self.engine = FakeEngine()
        self.sessions = Sessions(self.replica_epoch, CAPACITY)

    def _drop_subscription(self, router: Router) -> None:
        subscription = router.subscription
        if subscription.key is None:
            self.late_subscriptions.append(subscription.message)
        elif subscription.key in self.by_key:
            self.sessions.unsubscribe(subscription.key)

    def settle(self) -> None:
        """From here on the carrier is perfect: run until nobody waits for anything."""
        for _ in range(60):
            for router in self.routers:
                self.send(router)
            for _ in range(4):
                self._deliver_all()
                self.step()
            self._deliver_all()
            self.advance(0.5)
            if not any(router.open_outputs() or not router.streams.is_quiet for router in self.routers):
                return
        raise AssertionError("streams are still open after 30 s without any fault")

    def _deliver_all(self) -> None:
        for router in self.routers:
            if router.subscription.key is None:
                self.open_subscription(router.subscription)
            for call in list(router.calls):
                if call in router.calls:  # the epoch may have ended with the call before it
                    call.reply = self.apply(call.batch) if call.reply is None else call.reply
                    self.finish_call(router, call)
            while router.subscription.frames or router.subscription.is_ended:
                self.receive(router)
                if router.subscription.key is None:
                    break
