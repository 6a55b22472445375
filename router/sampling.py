"""Checked request fields -> the SamplingParams that travel to a replica."""

from typing import Final

from replicas.api import ModelCard, SamplingParams
from router.echo import EchoedPrompt
from router.errors import context_exceeded
from router.output import OutputOptions
from router.protocol import ChatBody, CompletionBody
from router.tools import ToolUse
from router.validation import num_outputs, stop_strings

DEFAULT_COMPLETION_TOKENS: Final = 16
"""max_tokens of /v1/completions when none is given, as OpenAI documents it."""
_SMALLEST_TOP_P: Final = 1e-9
"""OpenAI allows top_p = 0; the smallest set that reaches any probability is the most probable token."""
_SEED_SPACE: Final = 2**63


def max_tokens_for(
    body: ChatBody | CompletionBody, num_prompt_tokens: int, card: ModelCard, param: str
) -> int:
    """Return how many tokens may be generated after the prompt.

    An explicit number is kept or refused, never clamped. Without one a chat may use what is left of
    the context, a completion 16 tokens (or what is left, if that is less).
    Raises ApiError 400 context_length_exceeded.
    """
    limit = card.max_model_len
    asked = body.max_tokens
    if isinstance(body, ChatBody) and asked is None:
        asked = body.max_completion_tokens
    left = limit - num_prompt_tokens
    if left < 1 or (asked is not None and asked > left):
        raise context_exceeded(param, limit=limit, num_prompt_tokens=num_prompt_tokens, num_requested=asked)
    if asked is not None:
        return asked
    least = body.min_tokens or 0
    if least > left:
        raise context_exceeded(param, limit=limit, num_prompt_tokens=num_prompt_tokens, num_requested=least)
    return left if isinstance(body, ChatBody) else min(left, max(DEFAULT_COMPLETION_TOKENS, least))


def num_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """Return how many alternatives to report per token; None = no logprobs at all."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def _ranks(body: ChatBody | CompletionBody) -> bool:
    """Whether outputs compete, which takes logprobs that nobody may have asked to see."""
    return num_outputs(body) > (body.n or 1)


def sampling_params(
    body: ChatBody | CompletionBody,
    *,
    max_tokens: int,
    seed: int,
    special_ids: dict[str, int],
    grammar: str = "",
) -> SamplingParams:
    """Translate a body that passed validation. `seed` is used when the body has none.

    A stop string that is the text of a special token becomes a stop token: its text is never visible,
    so no search in the text could find it.
    """
    stop_ids = dict.fromkeys(body.stop_token_ids or ())
    stop_ids |= dict.fromkeys(special_ids[stop] for stop in stop_strings(body) if stop in special_ids)
    echoes = isinstance(body, CompletionBody) and bool(body.echo)
    logprobs = num_logprobs(body)
    return SamplingParams(
        # A prompt that is only to be echoed still takes one step; its token is not shown.
        max_tokens=max(1, max_tokens),
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=max(_SMALLEST_TOP_P, _or(body.top_p, 1.0)),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias={int(key): bias for key, bias in (body.logit_bias or {}).items()},
        seed=(seed if body.seed is None else body.seed) % _SEED_SPACE,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(body.ignore_eos),
        grammar=grammar,
        logprobs=0 if logprobs is None and _ranks(body) else logprobs,
        prompt_logprobs=logprobs if echoes else None,
    )


def output_options(
    body: ChatBody | CompletionBody,
    special_ids: dict[str, int],
    echo: EchoedPrompt | None,
    max_tokens: int,
    tools: ToolUse | None = None,
) -> OutputOptions:
    """Translate what a body that passed validation says about the text of its outputs."""
    stops = stop_strings(body)
    return OutputOptions(
        stops=tuple(stop for stop in stops if stop not in special_ids),
        special_stop_ids=frozenset(special_ids[stop] for stop in stops if stop in special_ids),
        min_tokens=body.min_tokens or 0,
        includes_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        shown_special_id=None if tools is None else special_ids.get(tools.form.opening),
        echo=echo,
        reports_prompt=echo is not None and num_logprobs(body) is not None,
        echo_only=max_tokens == 0,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
