"""Options that change an answer's text or its parts, end to end through the application."""

from typing import Any

import pytest

from replicas.api import FinishReason, TokenLogprobs
from router.app import App, build_app
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, TEXT, call
from tests.router.fake_backend import FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import IM_END, IM_START, app_token


def say_ids(*ids: int, stop_token_id: int | None = None) -> Any:
    def script(generation: FakeGeneration) -> None:
        finish = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        for index in range(generation.n):
            generation.push(ids, index=index, finish=finish, stop_token_id=stop_token_id)

    return script


A, B, C = (app_token(ord(char)) for char in "abc")


async def texts(app: App, path: str, body: dict[str, Any]) -> tuple[str, str, int]:
    """What an answer says whole, what it says streamed, and its completion tokens."""
    whole = (await call(app, path, body)).json
    events = (await call(app, path, body | {"stream": True})).events
    choice = whole["choices"][0]
    if path == CHAT:
        streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        return choice["message"]["content"], streamed, whole["usage"]["completion_tokens"]
    streamed = "".join(event["choices"][0]["text"] for event in events)
    return choice["text"], streamed, whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "asked"), [(TEXT, {"prompt": "x"}), (TEXT, {"prompt": [5, 6]}), (CHAT, HI)])
@pytest.mark.parametrize(("included", "text"), [(None, "a"), (False, "a"), (True, "abc")])
async def test_the_stop_string_is_included_only_when_asked_for(
    app: App, backend: FakeBackend, path: str, asked: dict[str, Any], included: bool | None, text: str
) -> None:
    backend.script = say_ids(A, B, C, A)
    body = asked | {"stop": "bc", "include_stop_str_in_output": included}
    assert await texts(app, path, body) == (text, text, 3)


@pytest.mark.parametrize("included", [False, True])
async def test_every_output_ends_at_its_own_stop_string(
    app: App, backend: FakeBackend, included: bool
) -> None:
    def script(generation: FakeGeneration) -> None:
        for index, ids in enumerate([(A, B, C, A), (B, C, A, A)]):
            generation.push(ids, index=index)

    backend.script = script
    body = {"prompt": "x", "n": 2, "stop": "bc", "include_stop_str_in_output": included}
    whole = (await call(app, TEXT, body)).json
    tail = "bc" * included
    assert [choice["text"] for choice in whole["choices"]] == ["a" + tail, tail]
    assert whole["usage"]["completion_tokens"] == 3 + 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert (await call(app, TEXT, body | options)).events[-1]["usage"] == whole["usage"]
    assert [generation.aborted_outputs for generation in backend.generations] == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "<|im_end|>"}, "a"),
        ({"stop": "<|im_end|>", "include_stop_str_in_output": True}, "a<|im_end|>"),
        ({"stop_token_ids": [IM_END], "include_stop_str_in_output": True}, "a"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<|im_end|>"),
        ({"skip_special_tokens": False}, "a"),
    ],
)
async def test_a_special_token_that_stops(
    app: App, backend: FakeBackend, fields: dict[str, Any], text: str
) -> None:
    backend.script = say_ids(A, IM_END, stop_token_id=IM_END)
    assert await texts(app, TEXT, {"prompt": "x"} | fields) == (text, text, 2)


async def test_an_included_stop_token_has_a_logprob(app: App, backend: FakeBackend) -> None:
    backend.script = lambda generation: generation.push(
        [A, IM_END],
        finish=FinishReason.STOP,
        stop_token_id=IM_END,
        logprobs=[TokenLogprobs(-1.0), TokenLogprobs(-2.0)],
    )
    body = {"prompt": "x", "logprobs": 0, "stop": "<|im_end|>", "include_stop_str_in_output": True}
    found = (await call(app, TEXT, body)).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "<|im_end|>"]
    assert found["text_offset"] == [0, 1]


async def test_special_tokens_within_the_text_are_shown_when_asked_for(
    app: App, backend: FakeBackend
) -> None:
    backend.script = say_ids(A, IM_START, B)
    assert (await texts(app, TEXT, {"prompt": "x"}))[0] == "ab"
    assert (await texts(app, TEXT, {"prompt": "x", "skip_special_tokens": False}))[0] == "a<|im_start|>b"


async def test_special_tokens_of_a_prompt_can_be_left_out(
    backend: FakeBackend, sentencepiece: TextCodec
) -> None:
    backend.script = say_ids(5)
    app = build_app(backend, sentencepiece)
    for adds in (None, True, False):
        await call(app, TEXT, {"prompt": "hello", "add_special_tokens": adds})
    [default, added, bare] = [generation.prompt_ids for generation in backend.generations]
    assert default == added == (1, *bare)


async def test_a_chat_gets_no_second_bos(backend: FakeBackend, sentencepiece: TextCodec) -> None:
    backend.script = say_ids(5)
    app = build_app(backend, sentencepiece)
    for adds in (None, True):
        await call(app, CHAT, HI | {"add_special_tokens": adds})
    assert backend.generations[0].prompt_ids == backend.generations[1].prompt_ids
    assert backend.generations[0].prompt_ids[:2].count(1) == 1


async def test_usage_on_every_chunk(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("abc")
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in ((CHAT, HI), (TEXT, {"prompt": "x"})):
        events = (await call(app, path, asked | {"stream": True, "stream_options": options})).events
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[0] == 1
        assert counts[-1] == 4
        assert events[-1]["choices"] == []


async def test_the_best_outputs_are_returned_best_first(app: App, backend: FakeBackend) -> None:
    def script(generation: FakeGeneration) -> None:
        assert generation.n == 3
        assert generation.sampling.logprobs == 0
        for index, (ids, logprob) in enumerate([((A,), -3.0), ((B, B), -1.0), ((C, C, C), -1.1)]):
            generation.push(
                ids, index=index, finish=FinishReason.LENGTH, logprobs=[TokenLogprobs(logprob)] * len(ids)
            )

    backend.script = script
    body = (await call(app, TEXT, {"prompt": ["x", "y"], "n": 2, "best_of": 3})).json
    choices = [(choice["index"], choice["text"], choice["logprobs"]) for choice in body["choices"]]
    assert choices == [(0, "bb", None), (1, "ccc", None), (2, "bb", None), (3, "ccc", None)]
    assert body["usage"]["completion_tokens"] == 2 * 6


async def test_the_last_message_is_continued(app: App, backend: FakeBackend, byte_level: TextCodec) -> None:
    backend.script = say_ids(A)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    await call(app, CHAT, {"messages": messages, "continue_final_message": True})
    prompt = byte_level.tokenizer.decode(backend.generations[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "


async def test_a_template_that_trims_trims_the_continued_message_too(
    backend: FakeBackend, sentencepiece: TextCodec
) -> None:
    backend.script = say_ids(5)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello "}]
    app = build_app(backend, sentencepiece)
    done = await call(app, CHAT, {"messages": messages, "continue_final_message": True})
    assert done.status == 200
    prompt = sentencepiece.tokenizer.decode(backend.generations[0].prompt_ids)
    assert prompt.endswith("[assistant] hello")


async def test_no_generation_prompt(app: App, backend: FakeBackend, byte_level: TextCodec) -> None:
    backend.script = say_ids(A)
    await call(app, CHAT, HI | {"add_generation_prompt": False})
    prompt = byte_level.tokenizer.decode(backend.generations[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"__headway_tick": 1}},
        {"chat_template_kwargs": []},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ],
)
async def test_what_cannot_be_meant_is_refused(app: App, fields: dict[str, Any]) -> None:
    assert (await call(app, CHAT, HI | fields)).status == 400
