"""Replicas on virtual time: real engine, real sessions, a runner that only says how long a step takes."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

import msgspec

from cluster.autoscaling_stats import replica_stats, router_stats
from cluster.simulation.fast_forward import Stretch, advance, is_decoding, max_decode_steps
from cluster.simulation.frame_queue import FrameQueue
from cluster.simulation.gaps import GapClock
from cluster.simulation.holdback import Holdback
from cluster.simulation.host import Host
from cluster.simulation.profile import StepTimes
from cluster.simulation.timed_runner import TOKEN_ID
from replicas.api import CommandBatch, ModelCard, Subscribe
from replicas.config import ResolvedConfig
from replicas.effects import AbortRequest, AddRequest, Effects, EngineCommand
from replicas.engine import Engine
from replicas.pump import withdrawal
from replicas.scheduler import Outputs
from replicas.sequence import Sequence, SequenceStatus
from replicas.sessions import Sessions
from replicas.step import Step, StepResult
from replicas.step_time import StepShape
from router.counters import RouterCounters

VOCAB_SIZE: Final = 32_000
TICK_S: Final = 1.0
"""An idle replica looks at its leases this often."""

_encode = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(CommandBatch).decode
_decode_counters = msgspec.msgpack.Decoder(RouterCounters).decode
_decode_subscribe = msgspec.msgpack.Decoder(Subscribe).decode


class VirtualReplica:
    """What replicas/pump.py does with its thread, on the running loop. Its engine's runner, too.

    With a `stretch_s`, decode steps of an unchanging batch are taken together, up to so many seconds of
    them: routers then hear of their tokens at the end, and of other plain tokens within the same time. A
    command ends a stretch at the end of the step
    under way, where the engine would have taken it.

    On a `host` that it shares, and with `noise`, steps are taken singly. The engine then learns what a step
    would take if the neighbours stayed as they are when it begins.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        steps: StepTimes,
        epoch: int,
        is_wanted: Callable[[], bool] = lambda: False,
        *,
        gaps: GapClock | None = None,
        stretch_s: float = 0.0,
        host: Host | None = None,
        noise: Callable[[StepShape], float] | None = None,
    ) -> None:
        """`is_wanted`: some router has a request waiting, so that an idle seat is a loss. `host`: with a
        seat taken on it, which is given back at the end. `noise`: factor on the time of each step."""
        self._config = config
        self._steps = steps
        self._epoch = epoch
        self._is_wanted = is_wanted
        self._gaps = gaps
        self._stretch_s = stretch_s if host is None and noise is None else 0.0
        self._host = host
        self._noise = noise
        self._holdback = Holdback(stretch_s)
        self._step_s = 0.0
        """Of the step just computed, which the loop's clock has yet to pass."""
        self._last: list[Sequence] = []
        """Sequences of the step just computed."""
        self.engine = Engine(
            config,
            self,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            clock=lambda: self._now() + self._step_s,
        )
        self._sessions = Sessions(epoch, self.engine.capacity)
        self._streams: dict[int, FrameQueue] = {}
        self._keys = itertools.count()
        self._commands: list[EngineCommand] = []
        self._has_commands = asyncio.Event()
        self._is_dying = False
        self._counters: dict[str, bytes] = {}
        self.wanted_seat_s = 0.0
        """Seats times seconds while some request waited in a router."""
        self.idle_seat_s = 0.0
        """Of those, without a sequence."""
        self.busy_s = 0.0
        """Time spent in steps."""

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

    @property
    def num_open_requests(self) -> int:
        """Requests that some router still waits for."""
        return self._sessions.num_open_requests

    def autoscaling_stats(self, cold_start_s: float) -> dict[str, float]:
        """What cluster.deployments.Replica would tell Serve's autoscaler."""
        load = self.engine.load()
        capability = self.engine.capability(load)
        stats = replica_stats(load, capability, self._config.block_size, cold_start_s)
        for counters in self._counters.values():
            stats |= router_stats(_decode_counters(counters))
        return stats

    def execute(self, step: Step) -> StepResult:
        self._step_s = self._steps.seconds(step.shape)
        if self._noise is not None:
            self._step_s *= self._noise(step.shape)
        if self._host is not None:
            self._step_s *= self._host.factor()
        self.busy_s += self._step_s
        self._count_seats(self.engine.scheduler.num_running, self._step_s)
        self._last = [entry.sequence for entry in step.sequences]
        return StepResult(token_ids=[TOKEN_ID if entry.samples else None for entry in step.sequences])

    async def run(self) -> None:
        """Step until `die`."""
        while not self._is_dying:
            await self._turn()
        for stream in self._streams.values():
            stream.put(None)
        if self._host is not None:
            self._host.num_free += 1

    def die(self) -> None:
        """End at the end of the step under way, with whatever is open."""
        self._is_dying = True
        self._has_commands.set()

    def apply(self, batch: bytes) -> bytes:
        message = _decode_batch(batch)
        if message.counters:
            self._counters[message.router_id] = message.counters
        applied = self._sessions.apply(message, self._now())
        self._carry_out(applied.effects)
        return _encode(applied.reply)

    def open(self, stream: FrameQueue, message: bytes) -> None:
        key = next(self._keys)
        self._streams[key] = stream
        stream.cancelled = lambda: self._cancelled(key)
        self._carry_out(self._sessions.subscribe(key, _decode_subscribe(message), self._now()))

    async def _turn(self) -> None:
        """One step, a stretch of them, or a short wait."""
        outputs = self._take_commands()
        if self.engine.has_work:
            stretch = self._stretch()
            made = await (self._step() if stretch is None else self._run_stretch(stretch))
            for owner, deltas in made.items():
                outputs.setdefault(owner, []).extend(deltas)
        now = self._now()
        news = self._holdback.filter(outputs, now)
        self._carry_out(self._sessions.publish(news, self.engine.load(), now, now))
        self._carry_out(self._sessions.expire(now))
        if not self.engine.has_work and not self._commands:
            await self._wait()

    async def _step(self) -> Outputs:
        outputs = self.engine.step()
        if self._host is None:
            await asyncio.sleep(self._step_s)
        else:
            await self._share(self._host)
        self._step_s = 0.0
        if self._gaps is not None:
            self._gaps.step(outputs, self._now())
        return outputs

    async def _share(self, host: Host) -> None:
        """Pass the step just computed beside those of the neighbours."""
        started_at = self._now()
        await host.work(self._step_s / host.factor())
        self.busy_s += self._now() - started_at - self._step_s

    def _stretch(self) -> Stretch | None:
        """The decode steps that may be taken together now, if there are any."""
        scheduler = self.engine.scheduler
        if not self._stretch_s or self._config.batching != "continuous" or scheduler.may_start_others():
            return None
        running = [sequence for sequence in self._last if sequence.status is SequenceStatus.RUNNING]
        if not running or len(running) != scheduler.num_running or not is_decoding(running):
            return None
        max_steps = max_decode_steps(running, scheduler.cache)
        if max_steps < 1:
            return None
        stretch = Stretch.of(running, self._steps, max_steps)
        return stretch.shortened(max(1, stretch.steps_within(self._stretch_s)))

    async def _run_stretch(self, stretch: Stretch) -> Outputs:
        started_at = self._now()
        num_steps = stretch.max_steps
        if await self._commands_within(stretch.elapsed_s(num_steps)):
            # The step under way goes on to its end, and the engine then takes the command.
            num_steps = min(num_steps, stretch.steps_within(self._now() - started_at) + 1)
        seconds = stretch.elapsed_s(num_steps)
        await asyncio.sleep(started_at + seconds - self._now())
        outputs = advance(stretch.sequences, num_steps, self.engine.scheduler.cache)
        self.busy_s += seconds
        self._count_seats(len(stretch.sequences), seconds)
        self._count(num_steps, num_steps * len(stretch.sequences))
        if self._gaps is not None:
            self._gaps.stretch(outputs, started_at, self._now())
        return outputs

    def _count(self, num_steps: int, num_tokens: int) -> None:
        counters = self.engine.counters
        counters.steps += num_steps
        counters.computed_tokens += num_tokens
        counters.output_tokens += num_tokens

    async def _commands_within(self, seconds: float) -> bool:
        """Wait so long, or until a command comes, or the end."""
        self._has_commands.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self._has_commands.set)
        try:
            await self._has_commands.wait()
        finally:
            timer.cancel()
        return bool(self._commands) or self._is_dying

    async def _wait(self) -> None:
        started_at = self._now()
        is_wanted = self._is_wanted()
        await self._commands_within(TICK_S)
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

    def _cancelled(self, key: int) -> None:
        self._sessions.unsubscribe(key)
        self._streams.pop(key, None)

    def _carry_out(self, effects: Effects) -> None:
        if effects.commands:
            self._commands += effects.commands
            self._has_commands.set()
        for delivery in effects.deliveries:
            stream = self._streams.get(delivery.subscription)
            if stream is None:
                continue
            for frame in delivery.frames:
                stream.put(frame)
            if delivery.ended:
                stream.put(None)
                del self._streams[delivery.subscription]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
