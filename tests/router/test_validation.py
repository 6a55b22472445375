import json
from typing import Any

import pytest

from router.errors import ApiError
from router.json_body import decode_body
from router.protocol import CHAT_DECODER, COMPLETION_DECODER
from router.validation import check_chat, check_completion, check_model
from tests.router.fake_backend import CARD

USER = [{"role": "user", "content": "hi"}]


def check(**fields: Any) -> None:
    body = json.dumps({"messages": USER, **fields}).encode()
    check_chat(decode_body(body, CHAT_DECODER), CARD)


def check_text(**fields: Any) -> None:
    body = json.dumps({"prompt": "hi", **fields}).encode()
    check_completion(decode_body(body, COMPLETION_DECODER), CARD)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 256),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", ["a"] * 5000),
        ("stop", "a" * 1025),
        ("stop_token_ids", [320]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", {"320": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 101}),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("messages", []),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_bad_value_is_refused_under_its_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert len(error.body()) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128, "seed": -(2**63), "temperature": 0, "top_p": 0, "top_k": -1, "min_p": 1},
        {"logit_bias": {}, "stop": [], "stop_token_ids": []},
        {"logit_bias": {"0": -100, "319": 100}, "stop_token_ids": [0, 319], "stop": ["a"] * 16},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 0},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bo"}]},
        {"messages": [{"role": "tool", "content": "4", "tool_call_id": "x"}]},
        {"messages": [{"role": "assistant", "content": "", "refusal": None, "tool_calls": []}]},
        dict.fromkeys(["n", "stop", "seed", "stream", "tools", "logit_bias", "max_tokens", "user"]),
    ],
)
def test_good_values_pass(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("reasoning_effort", "low"),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("store", 0),
        ("service_tier", "flex"),
    ],
)
def test_what_is_not_implemented_is_refused(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_a_bad_message_is_named_by_its_place(message: dict[str, Any], param: str) -> None:
    assert refusal(messages=[message]).param == param


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert refusal(min_tokens=5, max_tokens=4).param == "min_tokens"
    assert refusal(min_tokens=5, max_completion_tokens=4).param == "min_tokens"


def test_only_one_of_the_names_of_max_tokens_may_be_set() -> None:
    assert refusal(max_tokens=5, max_completion_tokens=5).param == "max_tokens"


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}, {"logprobs": 6}]
)
def test_completion_options_that_are_not_served_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        check_text(**fields)


def test_completion_defaults_that_clients_send_pass() -> None:
    check_text(n=2, best_of=2)
    check_text(echo=False, best_of=1, suffix=None, logprobs=5, n=1)


def test_refusals_do_not_echo_the_input() -> None:
    marker = "TELLTALE"
    for fields in (
        {"messages": [{"role": marker, "content": "x"}]},
        {"logit_bias": {marker: 1}},
        {"service_tier": marker},
        {"messages": [{"role": "user", "content": [{"type": marker}]}]},
    ):
        assert marker.encode() not in refusal(**fields).body()


def test_an_unknown_model_is_a_404_that_names_what_is_served() -> None:
    with pytest.raises(ApiError) as caught:
        check_model("gpt-4", CARD)
    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "tiny" in error.message


def test_no_model_means_the_served_one() -> None:
    check_model(None, CARD)
