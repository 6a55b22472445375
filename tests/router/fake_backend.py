"""A backend without replicas: the test says what is generated, and sees what was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from replicas.api import FinishReason, ModelCard, SamplingParams, TokenDelta, TokenLogprobs
from router.errors import ApiError, NoReplicaError
from router.generation import GenerationTimes

CARD = ModelCard(
    name="tiny",
    fingerprint="fp-tiny",
    vocab_size=320,
    max_model_len=256,
    eos_token_ids=(1,),
    num_blocks=64,
    block_size=16,
    max_num_seqs=8,
    replica_epoch=1,
)


@dataclass(kw_only=True, eq=False)
class FakeGeneration:
    """What the router asked for; deltas appear when the test pushes them."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int
    tier: int
    cache_salt: str
    trace_id: str
    traceparent: str
    tenant: str
    weight: float
    refusal: ApiError | None = None
    queue_wait_s: float | None = 0.0125
    times: GenerationTimes = field(default_factory=GenerationTimes)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    aborted_outputs: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    _deltas: "asyncio.Queue[TokenDelta | None]" = field(default_factory=asyncio.Queue)

    def push(
        self,
        token_ids: Iterable[int] = (),
        *,
        index: int = 0,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        cached: int | None = None,
        error: str | None = None,
        attempt: int = 0,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Generate these tokens now."""
        self._deltas.put_nowait(
            TokenDelta(
                request_id=1,
                attempt=attempt,
                index=index,
                token_ids=list(token_ids),
                finish_reason=finish,
                logprobs=logprobs,
                stop_token_id=stop_token_id,
                num_cached_tokens=cached,
                error=error,
                prompt_logprobs=prompt_logprobs,
            )
        )
        if finish is not None:
            self.finished.add(index)
            if len(self.finished) == self.n:
                self._deltas.put_nowait(None)

    def stop(self, *, index: int = 0) -> None:
        """End an output as a model does: with its EOS token."""
        self.push([1], index=index, finish=FinishReason.STOP, stop_token_id=1)

    def end(self) -> None:
        """Stop iterating although outputs may be unfinished: a broken backend."""
        self._deltas.put_nowait(None)

    def abort(self, index: int | None = None) -> None:
        if index is not None:
            self.aborted_outputs.append(index)
            if len(self.finished | set(self.aborted_outputs)) < self.n:
                return
        if len(self.finished) < self.n:
            self.aborted.set()
        self._deltas.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        while not self.aborted.is_set() and (delta := await self._deltas.get()) is not None:
            yield delta


@dataclass(eq=False)
class FakeBackend:
    """Hands out generations in the order asked. `script` plays each one at once, if given."""

    script: Callable[[FakeGeneration], None] | None = None
    card: ModelCard | None = CARD
    full: bool = False
    """Refuse to start anything."""
    generations: list[FakeGeneration] = field(default_factory=list)
    _started: "asyncio.Queue[FakeGeneration]" = field(default_factory=asyncio.Queue)

    def generate(
        self,
        *,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        n: int = 1,
        tier: int = 0,
        cache_salt: str = "",
        trace_id: str = "",
        traceparent: str = "",
        tenant: str = "",
        weight: float = 1.0,
    ) -> FakeGeneration:
        if self.full:
            raise NoReplicaError
        generation = FakeGeneration(
            prompt_ids=prompt_ids,
            sampling=sampling,
            n=n,
            tier=tier,
            cache_salt=cache_salt,
            trace_id=trace_id,
            traceparent=traceparent,
            tenant=tenant,
            weight=weight,
        )
        self.generations.append(generation)
        self._started.put_nowait(generation)
        if self.script is not None:
            self.script(generation)
        return generation

    async def started(self) -> FakeGeneration:
        """Wait for the next generation to be asked for."""
        return await self._started.get()
