"""A running answer: the generations of one HTTP request, merged, turned into text and written out."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from replicas.api import FinishReason, TokenDelta
from router import sse
from router.answers import CachedTokens, Usage
from router.errors import ApiError, ClientGoneError, generation_failed
from router.formats import AnswerFormat
from router.generation import Generation, GenerationTimes
from router.http import JSON_HEADERS, Exchange, Header
from router.output import Emission, OutputText

_MAX_DELTAS_AHEAD = 64
"""Deltas that the prompts of one request may be ahead of a client that reads slowly."""


Wrote = Callable[[int, int, bool], None]
"""An event is out: of which choice, how many of its tokens are out by now, whether it was the last."""


def _unheard(_choice: int, _num_tokens: int, _is_last: bool) -> None:
    return


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One prompt of a request, being generated."""

    generation: Generation
    num_prompt_tokens: int
    outputs: tuple[OutputText, ...]
    """By output index."""


class Answer:
    """All prompts of one request. Choice index = prompt * n + output index.

    With more outputs per prompt than `n` (best_of) the best n of each prompt are its choices.
    """

    def __init__(self, runs: Sequence[PromptRun], n: int, wrote: Wrote = _unheard) -> None:
        self._runs = runs
        self._n = n
        self._wrote = wrote
        self._cached: dict[int, int] = {}  # prompt -> its tokens that were cached
        self._abandoned = False

    @property
    def choices(self) -> list[OutputText]:
        """By choice index. All outputs have finished."""
        return [output for run in self._runs for output in _best(run.outputs, self._n)]

    @property
    def times(self) -> list[GenerationTimes]:
        """By prompt."""
        return [run.generation.times for run in self._runs]

    @property
    def is_complete(self) -> bool:
        """Every output has finished."""
        return all(output.finish_reason for run in self._runs for output in run.outputs)

    @property
    def usage(self) -> Usage:
        """Totals so far; a prompt counts once however many outputs it has."""
        prompt = sum(run.num_prompt_tokens for run in self._runs)
        completion = sum(output.num_tokens for run in self._runs for output in run.outputs)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(sum(self._cached.values())),
        )

    @property
    def queue_wait_s(self) -> float | None:
        """How long its prompts waited in this router at most; None while one still does."""
        waits = [run.generation.queue_wait_s for run in self._runs]
        known = [wait for wait in waits if wait is not None]
        return max(known) if known and len(known) == len(waits) else None

    def headers(self, headers: Iterable[Header]) -> list[Header]:
        """Add what is known of the answer by the time of its first byte."""
        wait_s = self.queue_wait_s
        waited = [] if wait_s is None else [(b"x-queue-wait-ms", b"%.1f" % (wait_s * 1000))]
        return [*headers, *waited]

    def abandon(self) -> None:
        """End all generations now: nobody waits for the answer any more. Idempotent."""
        self._abandoned = True
        for run in self._runs:
            run.generation.abort()

    async def emissions(self) -> AsyncGenerator[tuple[int, Emission], None]:
        """Yield what each delta made fit to send, with its choice index; empty ones are left out.

        Raises ClientGoneError once abandoned, and ApiError when a replica fails an output or a generation
        ends without finishing.
        """
        async with aclosing(_merged([run.generation for run in self._runs])) as deltas:
            async for prompt, delta in deltas:
                run = self._runs[prompt]
                output = run.outputs[delta.index]
                if output.finish_reason is not None:
                    continue
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise run.generation.refusal or self._failure(delta.error)
                if delta.num_cached_tokens is not None:
                    # What later outputs found in the cache may be their sibling's own work.
                    self._cached[prompt] = min(
                        self._cached.get(prompt, delta.num_cached_tokens), delta.num_cached_tokens
                    )
                emission = output.feed(delta)
                if emission.finish_reason is not None and delta.finish_reason is None:
                    # A stop string is known here only: the replica would go on.
                    run.generation.abort(delta.index)
                if emission.text or emission.entries or emission.finish_reason:
                    choice = prompt * self._n + delta.index
                    yield choice, emission
                    # Whoever asks for the next one has written this one.
                    self._wrote(choice, output.num_tokens, emission.finish_reason is not None)
        if not self.is_complete:
            raise self._failure(None)

    def _failure(self, reason: str | None) -> Exception:
        return ClientGoneError() if self._abandoned else generation_failed(reason)


async def write_whole(exchange: Exchange, answer: Answer, form: AnswerFormat) -> None:
    """Wait for all outputs, then answer in one body. Raises ApiError, ClientGoneError."""
    async with aclosing(answer.emissions()) as emissions:
        async for _ in emissions:
            pass
    body = form.whole(answer.choices, answer.usage)
    await exchange.respond(200, body, answer.headers(JSON_HEADERS))


async def write_stream(
    exchange: Exchange, answer: Answer, form: AnswerFormat, *, usage_at_end: bool, usage_always: bool
) -> None:
    """Send one event per emission. Nothing is sent before the first, so a failure until then has its
    true status; a later one is an error event, after which the stream ends without [DONE].

    Raises ApiError (only before the first byte), ClientGoneError.
    """
    try:
        await _write_events(exchange, answer, form, usage_always)
        usage = form.usage_event(answer.usage) if usage_at_end else b""
        await exchange.end_stream(usage + sse.DONE)
    except ApiError as error:
        if not exchange.started:
            raise
        exchange.record.code = error.code
        await exchange.end_stream(sse.error_event(error))


async def _write_events(exchange: Exchange, answer: Answer, form: AnswerFormat, usage_always: bool) -> None:
    opened: set[int] = set()
    async with aclosing(answer.emissions()) as emissions:
        async for index, emission in emissions:
            usage = answer.usage if usage_always else None
            data = form.event(index, emission, usage)
            if not data:
                continue  # what might be a call, or the beginning of one
            if index not in opened:
                opened.add(index)
                data = form.opening(index, usage) + data
            await exchange.stream(data, sse.HEADERS if exchange.started else answer.headers(sse.HEADERS))


def _best(outputs: Sequence[OutputText], n: int) -> Sequence[OutputText]:
    """Return the n outputs with the highest mean logprob, best first; all of them in their order if n."""
    if len(outputs) == n:
        return outputs
    return sorted(outputs, key=lambda output: -output.logprob_sum / output.num_tokens)[:n]


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """Yield the deltas of all generations as they come, each with its generation's index."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TokenDelta | None]] = asyncio.Queue(_MAX_DELTAS_AHEAD)

    async def pump(index: int, generation: Generation) -> None:
        async for delta in generation:
            await queue.put((index, delta))
        await queue.put((index, None))

    tasks = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    num_open = len(tasks)
    try:
        while num_open:
            index, arrived = await queue.get()
            if arrived is None:
                num_open -= 1
            else:
                yield index, arrived
    finally:
        for task in tasks:
            task.cancel()
