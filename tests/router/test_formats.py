import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from replicas.api import FinishReason, TokenDelta, TokenLogprobs, TopLogprob
from router.answers import CachedTokens, Usage
from router.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from router.output import Emission, OutputText
from router.text import TextCodec

USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=CachedTokens(0))
Form = Callable[[AnswerHead, Any], AnswerFormat]


def head(*, logprobs: bool = False, usage: bool = False) -> AnswerHead:
    return AnswerHead(
        id="x", created=5, model="m", fingerprint="f", wants_logprobs=logprobs, wants_usage=usage
    )


def data(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))


def finished(codec: TextCodec, ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> OutputText:
    output = OutputText(codec.pieces)
    output.feed(TokenDelta(1, 0, 0, ids, FinishReason.LENGTH, logprobs))
    return output


def ids_of(codec: TextCodec, text: str) -> list[int]:
    ids: list[int] = codec.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_a_chat_opens_with_the_role(byte_level: TextCodec) -> None:
    [choice] = data(ChatFormat(head(), byte_level.pieces).opening(3))["choices"]
    assert choice == {
        "index": 3,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


def test_the_last_chat_delta_is_empty(byte_level: TextCodec) -> None:
    event = ChatFormat(head(), byte_level.pieces).event(0, Emission("", (), FinishReason.STOP))
    assert data(event)["choices"][0]["delta"] == {}


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_usage_is_null_on_every_chunk_when_wanted_and_absent_otherwise(
    form: Form, byte_level: TextCodec
) -> None:
    pieces = byte_level.pieces
    assert "usage" not in data(form(head(), pieces).event(0, Emission("a")))
    assert data(form(head(usage=True), pieces).event(0, Emission("a")))["usage"] is None
    last = data(form(head(usage=True), pieces).usage_event(USAGE))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 3


def test_chat_logprobs_have_openais_shape(byte_level: TextCodec) -> None:
    [a, b] = ids_of(byte_level, "z") + ids_of(byte_level, "y")
    logprobs = [TokenLogprobs(-0.5, (TopLogprob(b, -0.25), TopLogprob(a, -0.5)))]
    body = data(
        ChatFormat(head(logprobs=True), byte_level.pieces).whole([finished(byte_level, [a], logprobs)], USAGE)
    )
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "z",
                "logprob": -0.5,
                "bytes": [122],
                "top_logprobs": [
                    {"token": "y", "logprob": -0.25, "bytes": [121]},
                    {"token": "z", "logprob": -0.5, "bytes": [122]},
                ],
            }
        ],
        "refusal": None,
    }


def test_chat_logprobs_without_alternatives_have_an_empty_list(byte_level: TextCodec) -> None:
    output = finished(byte_level, ids_of(byte_level, "z"), [TokenLogprobs(-math.inf)])
    body = data(ChatFormat(head(logprobs=True), byte_level.pieces).whole([output], USAGE))
    [entry] = body["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []
    assert entry["logprob"] == -9999.0


def test_bytes_of_a_split_character_add_up(codec: TextCodec) -> None:
    ids = ids_of(codec, "😀")[-4:]
    output = finished(codec, ids, [TokenLogprobs(-1.0)] * 4)
    body = data(ChatFormat(head(logprobs=True), codec.pieces).whole([output], USAGE))
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "😀"
    assert content[0]["token"] == "\\xf0"


def test_completion_logprobs_are_parallel_lists(byte_level: TextCodec) -> None:
    ids = ids_of(byte_level, "z😀y")
    [other] = ids_of(byte_level, "!")
    logprobs = [TokenLogprobs(-0.5, (TopLogprob(other, -0.25),))] * len(ids)
    body = data(
        CompletionFormat(head(logprobs=True), byte_level.pieces).whole(
            [finished(byte_level, ids, logprobs)], USAGE
        )
    )
    [choice] = body["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "z😀y"
    assert found["tokens"] == [
        "z",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
        "y",
    ]
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert found["token_logprobs"] == [-0.5] * 6
    assert found["top_logprobs"][0] == {"!": -0.25, "z": -0.5}


def test_without_logprobs_the_field_is_null(byte_level: TextCodec) -> None:
    output = finished(byte_level, ids_of(byte_level, "z"))
    for form in (ChatFormat, CompletionFormat):
        assert data(form(head(), byte_level.pieces).whole([output], USAGE))["choices"][0]["logprobs"] is None
