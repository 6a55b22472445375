"""POST /v1/chat/completions and /v1/completions: from a body to a running answer."""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import randbits
from typing import Final, TypeVar

from replicas.api import ModelCard
from router.access_log import AccessRecord
from router.answering import Answer, PromptRun, write_stream, write_whole
from router.callers import Caller, check_use
from router.chat_template import ChatTemplateError
from router.echo import EchoedPrompt
from router.errors import ApiError, NoReplicaError, bad_value, context_exceeded, unsupported
from router.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from router.generation import Backend
from router.grammar import output_grammar
from router.http import Exchange
from router.json_body import decode_body
from router.limits import Limits, Reservation
from router.output import OutputText
from router.protocol import CHAT_DECODER, COMPLETION_DECODER, ChatBody, CompletionBody
from router.sampling import max_tokens_for, num_logprobs, output_options, sampling_params
from router.text import TextCodec, TooManyTokensError
from router.tools import ToolUse, tool_grammar, tool_use
from router.validation import (
    MAX_CHOICES,
    check_chat,
    check_completion,
    check_model,
    check_token_ids,
    num_outputs,
)

T = TypeVar("T")

INLINE_BYTES: Final = 4096
"""Work on a body this small is done at once (about a millisecond): a thread would cost more than it saves."""
NUM_THREADS: Final = 2
"""Parsing and tokenising beside the event loop. Further large bodies wait for these; small ones never."""


def _draw_seed() -> int:
    return randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that is sound as far as can be known without starting it."""

    body: ChatBody | CompletionBody
    card: ModelCard
    prompts: list[list[int]]
    param: str
    """The field that the prompts came from."""
    echoes: list[EchoedPrompt | None]
    """Per prompt."""
    grammar: str
    """What the output must match; "" = anything."""
    tools: ToolUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Serves both endpoints on a backend."""

    backend: Backend
    text: TextCodec
    pool: ThreadPoolExecutor
    limits: Limits
    draw_seed: Callable[[], int] = _draw_seed
    now: Callable[[], float] = time.time

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """Answer a chat request. Raises ApiError, NoReplicaError, ClientGoneError."""
        data = await exchange.read_json()
        body = await self._offload(len(data), lambda: decode_body(data, CHAT_DECODER))
        card = self._card(body.model, caller)
        check_chat(body, card)
        if self.text.template is None:
            raise unsupported(
                "messages", "needs a chat template and this model has none; use /v1/completions"
            )
        tools = tool_use(body, self.text.tool_format)
        grammar = await self._offload(len(data), lambda: self._chat_grammar(body, tools))
        prompt = await self._offload(len(data), lambda: self._chat_prompt(body, card, tools))
        asked = _Asked(
            body=body,
            card=card,
            prompts=[prompt],
            param="messages",
            echoes=[None],
            grammar=grammar,
            tools=tools,
        )
        await self._answer(exchange, caller, asked)

    async def complete(self, exchange: Exchange, caller: Caller) -> None:
        """Answer a text completion request. Raises ApiError, NoReplicaError, ClientGoneError."""
        data = await exchange.read_json()
        body = await self._offload(len(data), lambda: decode_body(data, COMPLETION_DECODER))
        card = self._card(body.model, caller)
        check_completion(body, card)
        grammar = await self._offload(len(data), lambda: output_grammar(body))
        prompts = await self._offload(len(data), lambda: self._prompts(body, card))
        echoes = await self._offload(len(data), lambda: self._echoes(body, prompts))
        asked = _Asked(body=body, card=card, prompts=prompts, param="prompt", echoes=echoes, grammar=grammar)
        await self._answer(exchange, caller, asked)

    def _card(self, model: str | None, caller: Caller) -> ModelCard:
        card = self.backend.card
        if card is None:
            raise NoReplicaError
        check_model(model, card)
        check_use(caller, card.name)
        return card

    async def _offload(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work` where it does not hold up the other requests."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def _chat_grammar(self, body: ChatBody, tools: ToolUse | None) -> str:
        grammar = output_grammar(body)
        if tools is None:
            return grammar
        if grammar:
            raise bad_value(
                "tools", "tools cannot be combined with a form of the answer, unless tool_choice is none"
            )
        return tool_grammar(body, tools, self.text.pieces.special_ids)

    def _chat_prompt(self, body: ChatBody, card: ModelCard, tools: ToolUse | None) -> list[int]:
        try:
            ids = self.text.encode_chat(body, card.max_model_len, with_tools=tools is not None)
        except ChatTemplateError as error:
            raise bad_value("messages", str(error)) from None
        except TooManyTokensError as error:
            raise _too_long("messages", error, card) from None
        if not ids:
            raise bad_value("messages", "the messages render to an empty prompt")
        return ids

    def _prompts(self, body: CompletionBody, card: ModelCard) -> list[list[int]]:
        """Return the token ids of every prompt, in order. Raises ApiError."""
        prompts = _as_rows(body.prompt)
        num_choices = len(prompts) * num_outputs(body)
        if num_choices > MAX_CHOICES:
            raise bad_value("prompt", f"prompts times n must be at most {MAX_CHOICES}, not {num_choices}")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        try:
            adds = body.add_special_tokens is not False
            encoded = iter(self.text.encode_prompts(texts, card.max_model_len, add_special_tokens=adds))
        except TooManyTokensError as error:
            raise _too_long("prompt", error, card) from None
        rows = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        for index, row in enumerate(rows):
            param = "prompt" if len(rows) == 1 else f"prompt[{index}]"
            if not row:
                raise bad_value(param, f"{param} must not be empty")
            check_token_ids(param, row, card)
        return rows

    def _echoes(self, body: CompletionBody, prompts: list[list[int]]) -> list[EchoedPrompt | None]:
        if not body.echo:
            return [None] * len(prompts)
        skip = body.skip_special_tokens is not False
        return [EchoedPrompt.of(ids, self.text.pieces, skip_special_tokens=skip) for ids in prompts]

    async def _answer(self, exchange: Exchange, caller: Caller, asked: _Asked) -> None:
        max_tokens = [max_tokens_for(asked.body, len(i), asked.card, asked.param) for i in asked.prompts]
        reservation = await self._reserve(exchange, caller, asked, max_tokens)
        try:
            answer = self._start(exchange, caller, asked, max_tokens)
            try:
                exchange.watch(answer.abandon)
                await self._write(exchange, answer, asked)
            finally:
                exchange.close()
                # After a complete answer this changes nothing; after anything else it frees the replica.
                answer.abandon()
                _record_usage(exchange.record, answer)
        except (ApiError, NoReplicaError):
            reservation.cancel()  # nothing of it has been sent
            raise
        finally:
            record = exchange.record
            reservation.settle(record.prompt_tokens + record.completion_tokens)

    async def _reserve(
        self, exchange: Exchange, caller: Caller, asked: _Asked, max_tokens: list[int]
    ) -> Reservation:
        """Reserve what the request may use at most. Raises ApiError 400, 429, 503."""
        body, record = asked.body, exchange.record
        record.model, record.stream = asked.card.name, bool(body.stream)
        record.level = max(caller.tier, body.priority or 0)
        most = sum(map(len, asked.prompts)) + num_outputs(body) * sum(max_tokens)
        try:
            return await self.limits.reserve(caller.tenant, most)
        finally:
            exchange.extra_headers += self.limits.headers(caller.tenant)

    async def _write(self, exchange: Exchange, answer: Answer, asked: _Asked) -> None:
        options = asked.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        form = self._format(asked, wants_usage=wants_usage)
        if asked.body.stream:
            always = options is not None and bool(options.continuous_usage_stats)
            await write_stream(exchange, answer, form, usage_at_end=wants_usage, usage_always=always)
        else:
            await write_whole(exchange, answer, form)

    def _start(self, exchange: Exchange, caller: Caller, asked: _Asked, max_tokens: list[int]) -> Answer:
        """Start every prompt, or none. Raises ApiError, NoReplicaError."""
        body = asked.body
        pieces = self.text.pieces
        n, num_generated = body.n or 1, num_outputs(body)
        runs: list[PromptRun] = []
        try:
            for ids, echo, most in zip(asked.prompts, asked.echoes, max_tokens, strict=True):
                generation = self.backend.generate(
                    prompt_ids=tuple(ids),
                    sampling=sampling_params(
                        body,
                        max_tokens=most,
                        seed=self.draw_seed(),
                        special_ids=pieces.special_ids,
                        grammar=asked.grammar,
                    ),
                    n=num_generated,
                    tier=max(caller.tier, body.priority or 0),
                    cache_salt=caller.cache_salt,
                    trace_id=exchange.request_id,
                )
                options = output_options(body, pieces.special_ids, echo, most, asked.tools)
                outputs = [OutputText(pieces, options) for _ in range(num_generated)]
                runs.append(PromptRun(generation, len(ids), tuple(outputs)))
        except BaseException:
            Answer(runs, n).abandon()
            raise
        return Answer(runs, n)

    def _format(self, asked: _Asked, *, wants_usage: bool) -> AnswerFormat:
        is_chat = isinstance(asked.body, ChatBody)
        head = AnswerHead(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(self.now()),
            model=asked.card.name,
            fingerprint=asked.card.fingerprint,
            wants_logprobs=num_logprobs(asked.body) is not None,
            wants_usage=wants_usage,
            tools=asked.tools,
        )
        return (ChatFormat if is_chat else CompletionFormat)(head, self.text.pieces)


def _record_usage(record: AccessRecord, answer: Answer) -> None:
    usage = answer.usage
    record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    record.failed = not answer.is_complete


def _as_rows(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return one entry per prompt; a flat list of ints is one prompt. Raises ApiError for mixtures."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        what = "be a mixture of strings, ids and lists" if kinds else "be empty"
        raise bad_value("prompt", f"prompt must not {what}")
    if kinds == {int}:
        return [[entry for entry in prompt if isinstance(entry, int)]]
    return [entry for entry in prompt if not isinstance(entry, int)]


def _too_long(param: str, error: TooManyTokensError, card: ModelCard) -> ApiError:
    return context_exceeded(
        param,
        limit=card.max_model_len,
        num_prompt_tokens=error.at_least,
        num_requested=None,
        at_least=True,
    )
