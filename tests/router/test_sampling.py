import json
from typing import Any

import pytest

from replicas.api import SamplingParams
from router.errors import ApiError
from router.json_body import decode_body
from router.protocol import CHAT_DECODER, COMPLETION_DECODER, ChatBody, CompletionBody
from router.sampling import max_tokens_for, output_options, sampling_params
from tests.router.fake_backend import CARD

SPECIAL = {"<|im_end|>": 1}


def chat(**fields: Any) -> ChatBody:
    return decode_body(json.dumps({"messages": [], **fields}).encode(), CHAT_DECODER)


def text(**fields: Any) -> CompletionBody:
    return decode_body(json.dumps({"prompt": "", **fields}).encode(), COMPLETION_DECODER)


def params(body: ChatBody | CompletionBody, seed: int = 7) -> SamplingParams:
    return sampling_params(body, max_tokens=5, seed=seed, special_ids=SPECIAL)


@pytest.mark.parametrize("body", [chat(max_tokens=6), chat(max_completion_tokens=6), text(max_tokens=6)])
def test_an_explicit_number_that_fits_is_kept(body: ChatBody | CompletionBody) -> None:
    assert max_tokens_for(body, 250, CARD, "prompt") == 6


@pytest.mark.parametrize("body", [chat(max_tokens=7), chat(max_completion_tokens=7), text(max_tokens=7)])
def test_an_explicit_number_that_does_not_fit_is_refused(body: ChatBody | CompletionBody) -> None:
    with pytest.raises(ApiError) as caught:
        max_tokens_for(body, 250, CARD, "prompt")
    assert caught.value.code == "context_length_exceeded"
    for number in ("256", "257", "250", "7"):
        assert number in caught.value.message


@pytest.mark.parametrize("body", [chat(), text(), text(max_tokens=1)])
@pytest.mark.parametrize("num_prompt_tokens", [256, 257])
def test_a_prompt_that_fills_the_context_is_refused(
    body: ChatBody | CompletionBody, num_prompt_tokens: int
) -> None:
    with pytest.raises(ApiError) as caught:
        max_tokens_for(body, num_prompt_tokens, CARD, "prompt")
    assert caught.value.code == "context_length_exceeded"


def test_a_chat_without_a_number_may_use_what_is_left() -> None:
    assert max_tokens_for(chat(), 100, CARD, "messages") == 156


def test_a_completion_without_a_number_gets_16_or_what_is_left() -> None:
    assert max_tokens_for(text(), 100, CARD, "prompt") == 16
    assert max_tokens_for(text(), 250, CARD, "prompt") == 6
    assert max_tokens_for(text(min_tokens=20), 100, CARD, "prompt") == 20


def test_min_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        max_tokens_for(chat(min_tokens=20), 250, CARD, "messages")
    assert caught.value.code == "context_length_exceeded"


def test_defaults_are_openais() -> None:
    assert params(chat()) == SamplingParams(max_tokens=5, seed=7)


def test_fields_arrive_under_their_names() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 2,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
    }
    expected = SamplingParams(
        max_tokens=5, seed=9, stop_token_ids=(4, 3), logit_bias={5: -100.0}, logprobs=2, **fields
    )
    body = chat(
        seed=9, stop_token_ids=[4, 3, 4], logit_bias={"5": -100}, logprobs=True, top_logprobs=2, **fields
    )
    assert params(body) == expected


def test_openais_extremes_become_legal_ones() -> None:
    found = params(chat(top_p=0, top_k=-1))
    assert 0 < found.top_p < 1e-6
    assert found.top_k == 0


def test_a_negative_seed_is_a_seed_of_its_own() -> None:
    assert 0 <= params(chat(seed=-5)).seed != params(chat(seed=5)).seed


def test_a_drawn_seed_is_used_when_none_is_given() -> None:
    assert params(chat(), seed=11).seed == 11
    assert params(chat(seed=0), seed=11).seed == 0


def test_logprobs_count_alternatives() -> None:
    assert params(chat()).logprobs is None
    assert params(chat(logprobs=False)).logprobs is None
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(text(logprobs=3)).logprobs == 3


def test_a_stop_string_that_is_a_special_token_stops_by_its_id() -> None:
    body = chat(stop=["<|im_end|>", "x"])
    assert params(body).stop_token_ids == (1,)
    options = output_options(body, SPECIAL, None, 1)
    assert options.stops == ("x",)
    assert options.special_stop_ids == frozenset(
        sampling_params(body, max_tokens=1, seed=0, special_ids=SPECIAL).stop_token_ids
    )
