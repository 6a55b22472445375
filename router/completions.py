"""POST /v1/chat/completions and /v1/completions: from a body to a running answer."""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import randbits
from typing import Final

from replicas.api import ModelCard
from router.access_log import AccessRecord
from router.answering import Answer, PromptRun, write_stream, write_whole
from router.body_process import BodyProcess
from router.callers import Caller, check_use
from router.errors import ApiError, NoReplicaError
from router.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from router.generation import Backend
from router.http import Exchange
from router.limits import Limits, Reservation
from router.measures import AnswerTiming, RouterMeasures
from router.output import OutputText
from router.preparation import Endpoint, Prepared, prepare
from router.protocol import ChatBody
from router.sampling import max_tokens_for, num_logprobs, output_options, sampling_params
from router.text import TextCodec
from router.tracing import Span, Tracing
from router.validation import num_outputs

INLINE_BYTES: Final = 4096
"""Work on a body this small is done at once (about a millisecond): a thread would cost more than it saves."""
NUM_THREADS: Final = 2
"""Parsing and tokenising beside the event loop. Further large bodies wait for these; small ones never."""
PROCESS_BYTES: Final = 256 << 10
"""Parsing a body of this size holds the GIL for some 5 ms; what is larger goes to another process."""
STARTS_AT_ONCE: Final = 16
"""Prompts of one request that are started before the other requests get their turn."""


def _draw_seed() -> int:
    return randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Serves both endpoints on a backend."""

    backend: Backend
    text: TextCodec
    pool: ThreadPoolExecutor
    process: BodyProcess
    limits: Limits
    measures: RouterMeasures
    tracing: Tracing
    draw_seed: Callable[[], int] = _draw_seed
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    """That of Exchange.began_at."""

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """Answer a chat request. Raises ApiError, NoReplicaError, ClientGoneError."""
        await self._serve("chat", exchange, caller)

    async def complete(self, exchange: Exchange, caller: Caller) -> None:
        """Answer a text completion request. Raises ApiError, NoReplicaError, ClientGoneError."""
        await self._serve("completions", exchange, caller)

    async def _serve(self, endpoint: Endpoint, exchange: Exchange, caller: Caller) -> None:
        data = await exchange.read_json()
        card = self.backend.card
        if card is None:
            raise NoReplicaError
        prepared = await self._prepare(endpoint, data, card)
        check_use(caller, card.name)
        await self._answer(exchange, caller, prepared, card)

    async def _prepare(self, endpoint: Endpoint, data: bytes, card: ModelCard) -> Prepared:
        """Prepare the request where it does not hold up the others."""
        if len(data) <= INLINE_BYTES:
            return prepare(endpoint, data, self.text, card)
        loop = asyncio.get_running_loop()
        if len(data) <= PROCESS_BYTES:
            return await loop.run_in_executor(self.pool, prepare, endpoint, data, self.text, card)
        return await loop.run_in_executor(self.pool, self.process.prepare, endpoint, data, card)

    async def _answer(self, exchange: Exchange, caller: Caller, asked: Prepared, card: ModelCard) -> None:
        exchange.record.model = card.name
        level = exchange.record.level = caller.level_for(asked.body.priority)
        max_tokens = [max_tokens_for(asked.body, len(i), card, asked.param) for i in asked.prompts]
        reservation = await self._reserve(exchange, caller, asked, max_tokens)
        timing = self.measures.begin_answer(level, exchange.began_at, self.clock)
        span = self.tracing.begin(exchange.headers.get(b"traceparent", b""), exchange.began_at)
        try:
            answer = await self._start(exchange, caller, timing, asked, max_tokens, span.traceparent)
            try:
                exchange.watch(answer.abandon)
                await self._write(exchange, answer, asked, card)
            finally:
                exchange.close()
                # After a complete answer this changes nothing; after anything else it frees the replica.
                answer.abandon()
                _record_usage(exchange.record, answer)
                self._record_parts(span, answer)
        except (ApiError, NoReplicaError):
            reservation.cancel()  # nothing of it has been sent
            raise
        finally:
            timing.end()
            record = exchange.record
            reservation.settle(record.prompt_tokens + record.completion_tokens)
            span.end(
                {
                    "headway.request_id": exchange.request_id,
                    "headway.tier": self.measures.tier_name(level),
                    "headway.prompt_tokens": record.prompt_tokens,
                    "headway.output_tokens": record.completion_tokens,
                }
            )

    async def _reserve(
        self, exchange: Exchange, caller: Caller, asked: Prepared, max_tokens: list[int]
    ) -> Reservation:
        """Reserve what the request may use at most. Raises ApiError 400, 429, 503."""
        body, record = asked.body, exchange.record
        record.stream = bool(body.stream)
        most = sum(map(len, asked.prompts)) + num_outputs(body) * sum(max_tokens)
        try:
            return await self.limits.reserve(caller.tenant, most)
        finally:
            exchange.extra_headers += self.limits.headers(caller.tenant)

    async def _write(self, exchange: Exchange, answer: Answer, asked: Prepared, card: ModelCard) -> None:
        options = asked.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        form = self._format(asked, card, wants_usage=wants_usage)
        if asked.body.stream:
            always = options is not None and bool(options.continuous_usage_stats)
            await write_stream(exchange, answer, form, usage_at_end=wants_usage, usage_always=always)
        else:
            await write_whole(exchange, answer, form)

    async def _start(
        self,
        exchange: Exchange,
        caller: Caller,
        timing: AnswerTiming,
        asked: Prepared,
        max_tokens: list[int],
        traceparent: str,
    ) -> Answer:
        """Start every prompt, or none. Raises ApiError, NoReplicaError."""
        body = asked.body
        pieces = self.text.pieces
        n, num_generated = body.n or 1, num_outputs(body)
        runs: list[PromptRun] = []
        try:
            for ids, echo, most in zip(asked.prompts, asked.echoes, max_tokens, strict=True):
                generation = self.backend.generate(
                    prompt_ids=ids,
                    sampling=sampling_params(
                        body,
                        max_tokens=most,
                        seed=self.draw_seed(),
                        special_ids=pieces.special_ids,
                        grammar=asked.grammar,
                    ),
                    n=num_generated,
                    tier=timing.level,
                    cache_salt=caller.cache_salt,
                    trace_id=exchange.request_id,
                    traceparent=traceparent,
                    tenant=caller.tenant.name,
                    weight=caller.tenant.weight,
                )
                options = output_options(body, pieces.special_ids, echo, most, asked.tools)
                outputs = [OutputText(pieces, options) for _ in range(num_generated)]
                runs.append(PromptRun(generation, len(ids), tuple(outputs)))
                # Its ids are freed when it ends, not those of all prompts at once.
                asked.prompts[len(runs) - 1] = ()
                if len(runs) % STARTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except BaseException:
            Answer(runs, n).abandon()
            raise
        return Answer(runs, n, timing.wrote)

    def _record_parts(self, span: Span, answer: Answer) -> None:
        """Tell where an answer's time has gone: in the queue, and on replicas."""
        now = self.clock()
        for times in answer.times:
            if times.queued_at is not None:
                span.part("queue", times.queued_at, now if times.sent_at is None else times.sent_at)
            if times.sent_at is not None:
                span.part("replica", times.sent_at, now)

    def _format(self, asked: Prepared, card: ModelCard, *, wants_usage: bool) -> AnswerFormat:
        is_chat = isinstance(asked.body, ChatBody)
        head = AnswerHead(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(self.now()),
            model=card.name,
            fingerprint=card.fingerprint,
            wants_logprobs=num_logprobs(asked.body) is not None,
            wants_usage=wants_usage,
            tools=asked.tools,
        )
        return (ChatFormat if is_chat else CompletionFormat)(head, self.text.pieces)


def _record_usage(record: AccessRecord, answer: Answer) -> None:
    usage = answer.usage
    record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    record.queue_wait_s = answer.queue_wait_s
    record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    record.failed = not answer.is_complete
