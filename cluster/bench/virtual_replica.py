"""Replicas on virtual time: real engine, real sessions, a runner that only says how long a step takes."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from replicas.api import CommandBatch, ModelCard, Subscribe
from replicas.config import ResolvedConfig
from replicas.engine import Engine
from replicas.pump import withdrawal
from replicas.scheduler import Outputs
from replicas.sessions import AbortRequest, AddRequest, Effects, EngineCommand, Sessions
from replicas.step import Step, StepResult
from replicas.step_time import StepShape
from router.transport import FrameStream

VOCAB_SIZE: Final = 32_000
TICK_S: Final = 0.25
"""An idle replica looks at its leases this often."""

_encode = msgspec.msgpack.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: replicas.step_time's formula, linear in the new tokens."""

    step_s: float
    new_token_s: float
    query_key_pair_s: float
    read_token_s: float
    sample_s: float

    def of(self, shape: StepShape) -> float:
        return (
            self.step_s
            + self.new_token_s * shape.num_new_tokens
            + self.query_key_pair_s * shape.prefill_work
            + self.read_token_s * shape.kv_read_tokens
            + self.sample_s * shape.num_sampling
        )


class MemoryStream(FrameStream):
    """A step stream within the process."""

    def __init__(self) -> None:
        self.cancelled: Callable[[], None] = lambda: None
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, frame: bytes | None) -> None:
        """Hand over a frame; None ends the stream."""
        self._queue.put_nowait(frame)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (frame := await self._queue.get()) is not None:
            yield frame

    def cancel(self) -> None:
        self.cancelled()


class VirtualReplica:
    """What replicas/pump.py does with its thread, on the running loop. Its engine's runner, too."""

    def __init__(
        self,
        config: ResolvedConfig,
        cost: StepCost,
        epoch: int,
        is_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_wanted`: some router has a request waiting, so that an idle seat is a loss."""
        self._config = config
        self._cost = cost
        self._epoch = epoch
        self._is_wanted = is_wanted
        self._step_s = 0.0
        """Of the step just computed, which the loop's clock has yet to pass."""
        self.engine = Engine(
            config,
            self,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            clock=lambda: self._now() + self._step_s,
        )
        self._sessions = Sessions(epoch, self.engine.capacity)
        self._streams: dict[int, MemoryStream] = {}
        self._keys = itertools.count()
        self._commands: list[EngineCommand] = []
        self._has_commands = asyncio.Event()
        self.wanted_seat_s = 0.0
        """Seats times seconds while some request waited in a router."""
        self.idle_seat_s = 0.0
        """Of those, without a sequence."""

    @property
    def card(self) -> ModelCard:
        return ModelCard(
            name="virtual",
            fingerprint="virtual",
            vocab_size=VOCAB_SIZE,
            max_model_len=self._config.max_model_len,
            eos_token_ids=(),
            num_blocks=self._config.num_blocks,
            block_size=self._config.block_size,
            max_num_seqs=self._config.max_num_seqs,
            replica_epoch=self._epoch,
            takes_seats=self._config.takes_seats,
        )

    def execute(self, step: Step) -> StepResult:
        self._step_s = self._cost.of(step.shape)
        self._count_seats(self.engine.scheduler.num_running, self._step_s)
        return StepResult(token_ids=[1 if entry.samples else None for entry in step.sequences])

    async def run(self) -> None:
        """Step for ever."""
        while True:
            outputs = self._take_commands()
            if self.engine.has_work:
                for owner, deltas in self.engine.step().items():
                    outputs.setdefault(owner, []).extend(deltas)
                await asyncio.sleep(self._step_s)
                self._step_s = 0.0
            now = self._now()
            self._carry_out(self._sessions.publish(outputs, self.engine.load(), now, now))
            self._carry_out(self._sessions.expire(now))
            if not self.engine.has_work and not self._commands:
                await self._wait()

    def apply(self, batch: bytes) -> bytes:
        applied = self._sessions.apply(msgspec.msgpack.decode(batch, type=CommandBatch), self._now())
        self._carry_out(applied.effects)
        return _encode(applied.reply)

    def open(self, stream: MemoryStream, message: bytes) -> None:
        key = next(self._keys)
        self._streams[key] = stream
        stream.cancelled = lambda: self._sessions.unsubscribe(key)
        subscribe = msgspec.msgpack.decode(message, type=Subscribe)
        self._carry_out(self._sessions.subscribe(key, subscribe, self._now()))

    async def _wait(self) -> None:
        started_at = self._now()
        is_wanted = self._is_wanted()
        self._has_commands.clear()
        try:
            async with asyncio.timeout(TICK_S):
                await self._has_commands.wait()
        except TimeoutError:
            pass
        if is_wanted:
            self._count_seats(0, self._now() - started_at)

    def _count_seats(self, num_running: int, duration_s: float) -> None:
        if self._is_wanted():
            self.wanted_seat_s += self._config.max_num_seqs * duration_s
            self.idle_seat_s += (self._config.max_num_seqs - num_running) * duration_s

    def _take_commands(self) -> Outputs:
        outputs: Outputs = {}
        commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, AddRequest):
                self.engine.add(command.request, command.owner)
            elif isinstance(command, AbortRequest):
                self.engine.abort(command.owner, command.request_id, command.index)
            elif self.engine.withdraw(command.owner, command.request_id):
                outputs.setdefault(command.owner, []).extend(withdrawal(command))
        return outputs

    def _carry_out(self, effects: Effects) -> None:
        if effects.commands:
            self._commands += effects.commands
            self._has_commands.set()
        for delivery in effects.deliveries:
            stream = self._streams[delivery.subscription]
            for frame in delivery.frames:
                stream.put(frame)
            if delivery.ended:
                stream.put(None)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class VirtualTransport:
    """Implements router.transport.Transport; every message takes `delay_s`."""

    def __init__(self, replicas: dict[str, VirtualReplica], delay_s: float) -> None:
        self._replicas = replicas
        self._delay_s = delay_s

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        asyncio.get_running_loop().call_soon(changed, frozenset(self._replicas))

    async def card(self, replica: str) -> bytes:
        return _encode(self._replicas[replica].card)

    async def send(self, replica: str, batch: bytes) -> bytes:
        await asyncio.sleep(self._delay_s)
        reply = self._replicas[replica].apply(batch)
        await asyncio.sleep(self._delay_s)
        return reply

    def subscribe(self, replica: str, subscribe: bytes) -> FrameStream:
        stream = MemoryStream()
        self._replicas[replica].open(stream, subscribe)
        return stream
