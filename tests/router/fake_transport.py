"""A carrier in memory with real replica sessions and a fake engine at its other end."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import msgspec

from replicas.api import CommandBatch, ModelCard, ReplicaLoad, Subscribe
from replicas.effects import Effects
from replicas.sessions import Sessions
from router.backend import RESUME_WAIT_S, ReplicaBackend
from router.tenants import DEFAULT_TIERS, Tier
from router.transport import FrameStream, ReplicaGoneError
from router.waker import Wake
from tests.wire_world import CAPACITY, FakeEngine

STEP_S = 0.005
encode = msgspec.msgpack.encode


class FakeReplica:
    """Steps every STEP_S, on the loop's clock."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.engine = FakeEngine()
        self.sessions = Sessions(epoch, CAPACITY)
        self.streams: dict[int, FakeStream] = {}
        self.is_dead = False
        self.failure: str | None = None
        """While set, no step ends."""
        self._keys = itertools.count()
        self.sessions.publish({}, self.load(), 0.0, 0.0)

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(num_running=len(self.engine.requests), free_blocks=1000, num_blocks=1000)

    async def run(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(STEP_S)
            if self.failure is not None:
                continue
            now = asyncio.get_running_loop().time()
            self.carry_out(self.sessions.publish(self.engine.step(), self.load(), now, 0.0))
            self.carry_out(self.sessions.expire(now))

    def carry_out(self, effects: Effects) -> None:
        for command in effects.commands:
            self.engine.carry_out(command)
        for delivery in effects.deliveries:
            stream = self.streams[delivery.subscription]
            for frame in delivery.frames:
                stream.put(frame)
            if delivery.ended:
                stream.put(None)

    def apply(self, batch: CommandBatch) -> bytes:
        applied = self.sessions.apply(batch, asyncio.get_running_loop().time())
        self.carry_out(applied.effects)
        return encode(msgspec.structs.replace(applied.reply, failure=self.failure))

    def open(self, stream: "FakeStream", message: bytes) -> None:
        key = next(self._keys)
        self.streams[key] = stream
        stream.cancelled = lambda: self.sessions.unsubscribe(key)
        now = asyncio.get_running_loop().time()
        self.carry_out(self.sessions.subscribe(key, msgspec.msgpack.decode(message, type=Subscribe), now))

    def die(self) -> None:
        self.is_dead = True
        for stream in self.streams.values():
            stream.put(ReplicaGoneError("died"))


class FakeStream(FrameStream):
    def __init__(self) -> None:
        self.cancelled: Callable[[], None] = lambda: None
        self.is_cancelled = False
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def put(self, item: bytes | Exception | None) -> None:
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            item = await self._queue.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self.is_cancelled = True
        self.cancelled()


class FakeTransport:
    """Implements router.transport.Transport; tests change what it does to messages."""

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.batches: list[tuple[str, CommandBatch]] = []
        """Every batch sent, lost ones too."""
        self.streams: list[FakeStream] = []
        self.on_send: Callable[[str], None] = lambda _: None
        """Called before a batch is delivered; raises what the call is to raise."""
        self.num_sends_to_lose = 0
        """So many batches from now on are applied, but their replies lost."""
        self.is_silent = False
        """Calls hang."""
        self.fingerprints: dict[str, str] = {}
        """Of replicas that serve other weights than the rest."""
        self._changed: Callable[[frozenset[str]], None] = lambda _: None

    def list_candidates(self, *names: str) -> None:
        self._changed(frozenset(names))

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        self._changed = changed
        asyncio.get_running_loop().call_soon(changed, frozenset(self.replicas))

    async def card(self, replica: str) -> bytes:
        return encode(
            ModelCard(
                name="m",
                fingerprint=self.fingerprints.get(replica, "f"),
                vocab_size=100,
                max_model_len=64,
                eos_token_ids=(0,),
                num_blocks=10,
                block_size=16,
                max_num_seqs=8,
                replica_epoch=self._alive(replica).epoch,
            )
        )

    async def send(self, replica: str, batch: bytes) -> bytes:
        decoded = msgspec.msgpack.decode(batch, type=CommandBatch)
        self.batches.append((replica, decoded))
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        self.on_send(replica)
        reply = self._alive(replica).apply(decoded)
        if self.num_sends_to_lose:
            self.num_sends_to_lose -= 1
            raise TimeoutError
        return reply

    def subscribe(self, replica: str, subscribe: bytes) -> FakeStream:
        stream = FakeStream()
        self.streams.append(stream)
        try:
            self._alive(replica).open(stream, subscribe)
        except ReplicaGoneError as error:
            stream.put(error)
        return stream

    def _alive(self, name: str) -> FakeReplica:
        replica = self.replicas.get(name)
        if replica is None or replica.is_dead:
            raise ReplicaGoneError(name)
        return replica


@asynccontextmanager
async def serving(
    *names: str,
    tiers: Iterable[Tier] = DEFAULT_TIERS,
    resume_wait_s: float = RESUME_WAIT_S,
    wake: Wake | None = None,
    next_to_go: Collection[str] = (),
) -> AsyncIterator[tuple[ReplicaBackend, FakeTransport]]:
    """A started backend, connected to a running replica of each name."""
    transport = FakeTransport()
    backend = ReplicaBackend(
        transport,
        router_id="r",
        first_epoch=1,
        draw=Random(0),
        tiers=tiers,
        resume_wait_s=resume_wait_s,
        wake=wake,
        next_to_go=lambda: next_to_go,
    )
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        for epoch, name in enumerate(names, 1):
            transport.replicas[name] = FakeReplica(epoch)
            group.create_task(transport.replicas[name].run())
        stack.callback(lambda: [replica.die() for replica in transport.replicas.values()])
        stack.push_async_callback(backend.close)
        backend.start()
        await asyncio.sleep(STEP_S)
        yield backend, transport
