"""EnginePump: the engine's thread, and what the rest of the process may ask of it.

Bytes go in (command batches, subscriptions) and bytes come out (replies, frames), so that the shell in
front knows nothing of engines. Two kinds of threads meet here: the pump's own, which alone touches the
engine, and the shell's, which call `apply` and `subscribe`. One lock guards the sessions; it is held for
microseconds, never during a step.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from replicas.api import (
    CommandBatch,
    FinishReason,
    FrameBatch,
    GenerateRequest,
    ModelCard,
    ReplicaLoad,
    Subscribe,
    TokenDelta,
)
from replicas.effects import AbortRequest, Effects, EngineCommand, WithdrawRequest
from replicas.engine import Engine
from replicas.errors import RequestError
from replicas.scheduler import Outputs
from replicas.sessions import Sessions
from replicas.step_record import StepWatch
from replicas.step_recorder import StepRecorder
from replicas.traced_requests import EngineTrace, TracedRequests

EXPIRE_INTERVAL_S: Final = 0.25
IDLE_CHECK_S: Final = 1.0
"""The integrity of the KV cache is checked once after so long without work."""
COUNTERS_TTL_S: Final = 60.0
FLOOR_S: Final = 5.0

logger = logging.getLogger(__name__)


class Subscription:
    """One open step stream. `wake` is called from any thread when there is something to take."""

    def __init__(self, close: Callable[[], None], wake: Callable[[], None]) -> None:
        self._close = close
        self._wake = wake
        self._frames: deque[bytes] = deque()
        self._oldest_at = 0.0
        self.closed = False
        """Nothing comes after the frames that `take` still gives."""

    @property
    def oldest_at(self) -> float:
        """When the step of the oldest frame that was not taken ended, on the pump's clock."""
        return self._oldest_at

    def take(self) -> list[bytes]:
        """The frames that have come since the last call, in order."""
        frames = []
        while self._frames:
            frames.append(self._frames.popleft())
        return frames

    def close(self) -> None:
        """The consumer goes away. Idempotent."""
        self._close()

    def put(self, frames: list[bytes], ended: bool, at: float) -> None:
        """Called by the pump only."""
        if not self._frames:
            self._oldest_at = at
        self._frames.extend(frames)
        self.closed = self.closed or ended
        self._wake()


class EnginePump:
    """Runs the engine in a thread of its own from `start` to `stop`.

    An exception that leaves the engine is a bug: it is logged, all streams end, and `failure` says so
    from then on; whoever watches it replaces the process.
    """

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.card = card
        self._clock = clock
        self._wall_clock = wall_clock
        self._sessions = Sessions(card.replica_epoch, engine.capacity)
        self._recorder = StepRecorder(clock, time.thread_time)
        self._subscriptions: dict[int, Subscription] = {}
        self._floor_at = -math.inf
        self._counters: dict[str, tuple[float, bytes]] = {}
        self._next_key = 0
        self._commands: deque[EngineCommand] = deque()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._stopping = False
        self._failure: str | None = None
        self._load = ReplicaLoad()
        self._traced: TracedRequests | None = None
        self._thread = threading.Thread(target=self._run, name="headway-engine", daemon=True)
        self._batch_decoder = msgspec.msgpack.Decoder(CommandBatch)
        self._subscribe_decoder = msgspec.msgpack.Decoder(Subscribe)
        self._watch_decoder = msgspec.msgpack.Decoder(StepWatch)

    def trace_to(self, sink: Callable[[EngineTrace], None]) -> None:
        """Tell `sink` of every traced request that ends, in the engine's thread. Call before `start`."""
        self._traced = TracedRequests(sink)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the running step; open streams end. Idempotent."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def apply(self, batch: bytes) -> bytes:
        """Take an encoded CommandBatch, return the encoded BatchReply. Thread-safe, microseconds."""
        message = self._batch_decoder.decode(batch)
        with self._work:
            now = self._clock()
            if message.counters:
                self._counters[message.router_id] = (now, message.counters)
            applied = self._sessions.apply(message, now)
            self._carry_out(applied.effects, now)
        return msgspec.msgpack.encode(msgspec.structs.replace(applied.reply, failure=self.failure()))

    def steps(self, watch: bytes) -> bytes:
        """Take an encoded StepWatch, return the encoded StepNews. Thread-safe."""
        message = self._watch_decoder.decode(watch)
        with self._lock:
            report = self._recorder.read(message)
        return msgspec.msgpack.encode(report)

    def subscribe(self, message: bytes, wake: Callable[[], None]) -> Subscription:
        """Open a step stream for an encoded Subscribe. Thread-safe."""
        subscribe = self._subscribe_decoder.decode(message)
        with self._work:
            key = self._next_key
            self._next_key += 1
            subscription = Subscription(lambda: self._unsubscribe(key), wake)
            self._subscriptions[key] = subscription
            if self._stopping or self._failure:
                self._end_subscriptions()
            else:
                now = self._clock()
                self._carry_out(self._sessions.subscribe(key, subscribe, now), now)
        return subscription

    async def stream(self, message: bytes) -> AsyncGenerator[FrameBatch, None]:
        """The same as an asynchronous iterator; closing it ends the subscription.

        As many frames at a time as have come: a slow carrier then carries fewer, larger messages.
        """
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to read
                loop.call_soon_threadsafe(ready.set)

        subscription = self.subscribe(message, wake)
        try:
            while True:
                await ready.wait()
                ready.clear()
                is_last = subscription.closed
                delay_s = self._clock() - subscription.oldest_at
                if frames := subscription.take():
                    yield FrameBatch(frames, delay_s, self._wall_clock())
                if is_last:
                    return
        finally:
            subscription.close()

    def failure(self) -> str | None:
        """Why this replica must be replaced; None while it is well. Thread-safe."""
        if self._failure is None and not self._thread.is_alive() and not self._stopping:
            return "the engine thread is not running"
        return self._failure or self.engine.stall_reason(self._clock())

    @property
    def load(self) -> ReplicaLoad:
        """The state after the last step. Thread-safe."""
        return self._load

    @property
    def was_at_floor(self) -> bool:
        """Some step of the last seconds computed prompts at the least rate, and was too long all the same."""
        return self._clock() - self._floor_at < FLOOR_S

    def counters(self) -> list[bytes]:
        """The last counters of every router that has sent some within a minute. Thread-safe."""
        with self._lock:
            since = self._clock() - COUNTERS_TTL_S
            self._counters = {name: sent for name, sent in self._counters.items() if sent[0] >= since}
            return [counters for _, counters in self._counters.values()]

    @property
    def num_open_requests(self) -> int:
        """Requests that some router still waits for."""
        with self._lock:
            return self._sessions.num_open_requests

    # The engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            logger.exception("the engine stopped")
            self._failure = f"the engine stopped: {type(error).__name__}: {error}"[:500]
        with self._lock:
            self._end_subscriptions()

    def _turn(self) -> None:
        """One step, or a short wait when there is nothing to do."""
        outputs = self._take_commands()
        step = None
        if self.engine.has_work:
            for owner, deltas in self.engine.step().items():
                outputs.setdefault(owner, []).extend(deltas)
            step = self.engine.last_step
        now, sent_at = self._clock(), self._wall_clock()
        load = self._load = self.engine.load()
        if load.overloaded:
            self._floor_at = now
        if self._traced is not None:
            self._traced.stepped(outputs, now)
        with self._work:
            if self._recorder.is_due(now, is_last=not self.engine.has_work):
                self._recorder.note(step, load, sent_at)
            self._carry_out(self._sessions.publish(outputs, load, now, sent_at), now)
            self._expire(now)
            if not self.engine.has_work and not self._commands and not self._stopping:
                self._wait_for_work()

    def _take_commands(self) -> Outputs:
        """Apply what the routers want; returns deltas for requests that were refused or withdrawn."""
        ended: Outputs = {}
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, AbortRequest):
                self.engine.abort(command.owner, command.request_id, command.index)
                if self._traced is not None:
                    now = self._clock()
                    self._traced.aborted(command.owner, command.request_id, command.index, now)
            elif isinstance(command, WithdrawRequest):
                if self.engine.withdraw(command.owner, command.request_id):
                    ended.setdefault(command.owner, []).extend(withdrawal(command))
            else:
                try:
                    self.engine.add(command.request, command.owner)
                    if self._traced is not None:
                        self._traced.added(command.owner, command.request, self._clock())
                except RequestError as error:
                    ended.setdefault(command.owner, []).extend(_refusal(command.request, str(error)))
        return ended

    def _wait_for_work(self) -> None:
        """Sleep until a command comes; check the books when the engine has been idle for a while."""
        idle_since = self._clock()
        is_checked = False
        while not self._commands and not self._stopping:
            self._work.wait(EXPIRE_INTERVAL_S)
            now = self._clock()
            self._expire(now)
            if not is_checked and now - idle_since > IDLE_CHECK_S:
                self.engine.scheduler.check_integrity()
                is_checked = True

    # With the lock held

    def _expire(self, now: float) -> None:
        self._carry_out(self._sessions.expire(now), now)

    def _carry_out(self, effects: Effects, now: float) -> None:
        if effects.commands:
            self._commands.extend(effects.commands)
            self._work.notify()
        for delivery in effects.deliveries:
            subscription = self._subscriptions.get(delivery.subscription)
            if subscription is not None:
                subscription.put(delivery.frames, delivery.ended, now)
                if delivery.ended:
                    del self._subscriptions[delivery.subscription]

    def _end_subscriptions(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.put([], ended=True, at=self._clock())
        self._subscriptions.clear()

    def _unsubscribe(self, key: int) -> None:
        with self._lock:
            if self._subscriptions.pop(key, None) is not None:
                self._sessions.unsubscribe(key)


def withdrawal(command: WithdrawRequest) -> list[TokenDelta]:
    """The last deltas of a request that was withdrawn."""
    request_id, attempt = command.request_id, command.attempt
    return [TokenDelta(request_id, attempt, index, [], FinishReason.ABORT) for index in command.indexes]


def _refusal(request: GenerateRequest, reason: str) -> list[TokenDelta]:
    return [
        TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=reason,
        )
        for index in request.indexes
    ]
