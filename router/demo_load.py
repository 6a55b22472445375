"""DemoLoads: a bounded load of made-up requests, started from the live page to have something to watch.

Its requests are ordinary traffic of the tenant that starts it: its tier, its limits, its share. The response
is an event stream of what became of them, and the load ends with it: hanging up is how to stop one.
"""

import asyncio
from contextvars import Context
from random import Random
from typing import Annotated, Final, Literal

import msgspec

from replicas.api import FinishReason, ModelCard, SamplingParams, TokenDelta
from router import sse
from router.callers import Caller, check_use
from router.errors import ApiError, NoReplicaError
from router.generation import Backend
from router.http import Exchange
from router.json_body import decode_body
from router.limits import Limits
from router.measures import RouterMeasures

REPORT_INTERVAL_S: Final = 0.5
MAX_REQUESTS: Final = 600
MAX_BODY_BYTES: Final = 4096
MAX_LENGTH_RATIO: Final = 8.0
"""The longest answer over the mean: long ones among short ones are what batching is about."""


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to ask for."""

    requests_per_s: Annotated[float, msgspec.Meta(gt=0, le=50)] = 4.0
    """Mean; arrivals are Poisson."""
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=120)] = 20.0
    """Arrivals end then, or after MAX_REQUESTS; the answers under way are waited for."""
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 200
    """Mean; uniform from half to one and a half times of it."""
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 60
    """Mean; exponential."""
    priority: int | None = None
    """Level of the tier; None = drawn from all that the caller may use."""


_decoder: Final = msgspec.json.Decoder(LoadBody)


class LoadEvent(msgspec.Struct, kw_only=True):
    """What became of the requests so far."""

    kind: Literal["load"] = "load"
    num_sent: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_refused: int = 0
    num_failed: int = 0
    output_tokens: int = 0
    ended: bool = False


class DemoLoads:
    """Serves POST /ui/load, one load at a time. One event loop."""

    def __init__(self, backend: Backend, limits: Limits, measures: RouterMeasures, draw: Random) -> None:
        self._backend = backend
        self._limits = limits
        self._measures = measures
        self._draw = draw
        self._is_running = False

    async def serve(self, exchange: Exchange, caller: Caller) -> None:
        """Run a load and tell of it. Raises ApiError 400, 403, 409, NoReplicaError, ClientGoneError."""
        body = decode_body(await exchange.read_json(MAX_BODY_BYTES), _decoder)
        card = self._backend.card
        if card is None:
            raise NoReplicaError
        check_use(caller, card.name)
        caller.level_for(body.priority)
        if self._is_running:
            raise ApiError(409, "a demo load is running on this router already", code="load_running")
        self._is_running = True
        load = _Load(self._backend, self._limits, self._measures, self._draw, caller, body, card)
        # An empty context: what it sends to replicas does not belong to this request of Serve.
        running = asyncio.get_running_loop().create_task(load.run(), context=Context())
        exchange.watch(lambda: _cancel(running))
        try:
            while not running.done():
                await exchange.stream(sse.event(load.event), sse.HEADERS)
                await asyncio.wait((running,), timeout=REPORT_INTERVAL_S)
            if not running.cancelled():
                running.result()
                await exchange.end_stream(sse.event(load.event))
        finally:
            running.cancel()
            exchange.close()
            self._is_running = False


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class _Load:
    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        measures: RouterMeasures,
        draw: Random,
        caller: Caller,
        body: LoadBody,
        card: ModelCard,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._measures = measures
        self._draw = draw
        self._caller = caller
        self._body = body
        self._card = card
        self.event = LoadEvent()

    async def run(self) -> None:
        """Send all requests and wait for their ends. Cancelling it aborts what runs."""
        ends_at = asyncio.get_running_loop().time() + self._body.duration_s
        async with asyncio.TaskGroup() as requests:
            while self.event.num_sent < MAX_REQUESTS:
                await asyncio.sleep(self._draw.expovariate(self._body.requests_per_s))
                if asyncio.get_running_loop().time() >= ends_at:
                    break
                self.event.num_sent += 1
                requests.create_task(self._ask(self.event.num_sent))
        self.event.ended = True

    async def _ask(self, number: int) -> None:
        prompt_ids, max_tokens = self._draw_prompt(), self._draw_output_tokens()
        num_tokens = 0
        self.event.num_running += 1
        try:
            reservation = await self._limits.reserve(self._caller.tenant, len(prompt_ids) + max_tokens)
            try:
                num_tokens = await self._generate(number, prompt_ids, max_tokens)
            except (ApiError, NoReplicaError):
                reservation.cancel()
                raise
            finally:
                reservation.settle(len(prompt_ids) + num_tokens)
        except (ApiError, NoReplicaError):
            self.event.num_refused += 1
        finally:
            self.event.num_running -= 1

    async def _generate(self, number: int, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        """Return the tokens generated."""
        level = self._draw_level()
        clock = asyncio.get_running_loop().time
        timing = self._measures.begin_answer(level, clock(), clock)
        generation = None
        num_tokens = 0
        try:
            generation = self._backend.generate(
                prompt_ids=prompt_ids,
                sampling=SamplingParams(
                    max_tokens=max_tokens, ignore_eos=True, seed=self._draw.getrandbits(63)
                ),
                tier=level,
                cache_salt=self._caller.cache_salt,
                trace_id=f"demo-{number}",
                tenant=self._caller.tenant.name,
                weight=self._caller.tenant.weight,
            )
            async for delta in generation:
                if delta.finish_reason is FinishReason.ERROR and generation.refusal is not None:
                    raise generation.refusal
                num_tokens += len(delta.token_ids)
                timing.wrote(0, num_tokens, delta.finish_reason is not None)
                self._count(delta)
        finally:
            timing.end()
            if generation is not None:
                generation.abort()
        return num_tokens

    def _count(self, delta: TokenDelta) -> None:
        self.event.output_tokens += len(delta.token_ids)
        if delta.finish_reason is FinishReason.ERROR:
            self.event.num_failed += 1
        elif delta.finish_reason is not None:
            self.event.num_finished += 1

    def _draw_prompt(self) -> tuple[int, ...]:
        mean = self._body.prompt_tokens
        room = max(1, self._card.max_model_len // 2)
        length = min(room, max(1, self._draw.randint(mean // 2, mean + mean // 2)))
        return tuple(self._draw.randrange(self._card.vocab_size) for _ in range(length))

    def _draw_output_tokens(self) -> int:
        mean = self._body.output_tokens
        room = max(1, self._card.max_model_len // 2 - 1)
        return max(1, min(room, round(mean * min(MAX_LENGTH_RATIO, self._draw.expovariate(1.0)))))

    def _draw_level(self) -> int:
        if self._body.priority is not None:
            return self._caller.level_for(self._body.priority)
        return self._draw.choice([level for level in self._caller.levels if level >= self._caller.tier])
