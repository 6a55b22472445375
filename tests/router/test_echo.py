"""The prompt in the answer: text, tokens, logprobs and offsets that belong together."""

from typing import Any

import pytest

from replicas.api import FinishReason, TokenLogprobs, TopLogprob
from router.app import App, build_app
from router.echo import EchoedPrompt
from router.text import TextCodec
from tests.router.asgi_client import TEXT, call
from tests.router.fake_backend import FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import IM_START, app_token


def script(generation: FakeGeneration) -> None:
    """Say "z", with the logprobs asked for; a prompt's come in two parts, as from split frames."""
    sampling = generation.sampling
    for index in range(generation.n):
        prompt = None
        if sampling.prompt_logprobs is not None:
            prompt = [
                TokenLogprobs(-float(i), (TopLogprob(9, -0.5),) * min(1, sampling.prompt_logprobs))
                for i in range(1, len(generation.prompt_ids))
            ]
            generation.push(index=index, prompt_logprobs=prompt[:1])
            prompt = prompt[1:]
        generated = None if sampling.logprobs is None else [TokenLogprobs(-7.0)]
        generation.push(
            [app_token(ord("z"))],
            index=index,
            finish=FinishReason.LENGTH,
            logprobs=generated,
            prompt_logprobs=prompt,
        )


async def whole_and_streamed(app: App, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choice of an answer, asked for in one piece and as a stream put together again."""
    [whole] = (await call(app, TEXT, body)).json["choices"]
    streamed: dict[str, Any] = {"index": 0, "text": "", "logprobs": None}
    for event in (await call(app, TEXT, body | {"stream": True})).events:
        [choice] = event["choices"]
        streamed["text"] += choice["text"]
        streamed["finish_reason"] = choice["finish_reason"]
        if choice["logprobs"] is not None:
            lists = streamed["logprobs"] or {name: [] for name in choice["logprobs"]}
            streamed["logprobs"] = {name: lists[name] + choice["logprobs"][name] for name in lists}
    return [whole, streamed]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_lists_and_text_cover_prompt_and_answer(
    app: App, backend: FakeBackend, max_tokens: int
) -> None:
    backend.script = script
    body = {"prompt": "héllo x", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    for choice in await whole_and_streamed(app, body):
        ids = backend.generations[-1].prompt_ids
        found = choice["logprobs"]
        assert choice["text"] == "héllo x" + "z" * max_tokens
        assert choice["finish_reason"] == "length"
        assert {len(entries) for entries in found.values()} == {len(ids) + max_tokens}
        expected = [None, *(-float(i) for i in range(1, len(ids))), *[-7.0] * max_tokens]
        assert found["token_logprobs"] == expected
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][1].keys() > {found["tokens"][1]}
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


async def test_a_prompt_that_is_only_echoed_costs_no_completion_tokens(
    app: App, backend: FakeBackend
) -> None:
    backend.script = script
    body = (await call(app, TEXT, {"prompt": "abc", "echo": True, "max_tokens": 0})).json
    assert body["usage"]["completion_tokens"] == 0
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"] is None


async def test_without_echo_zero_tokens_are_refused(app: App) -> None:
    refused = await call(app, TEXT, {"prompt": "abc", "max_tokens": 0})
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")


async def test_every_choice_echoes_its_own_prompt(app: App, backend: FakeBackend) -> None:
    backend.script = script
    body = {"prompt": ["ab", "cde"], "n": 2, "echo": True, "logprobs": 0}
    choices = (await call(app, TEXT, body)).json["choices"]
    assert [choice["text"] for choice in choices] == ["abz", "abz", "cdez", "cdez"]
    assert [len(c["logprobs"]["tokens"]) for c in choices] == [3, 3, 4, 4]


async def test_a_character_split_between_prompt_and_answer_is_whole(
    app: App, backend: FakeBackend, byte_level: TextCodec
) -> None:
    ids = byte_level.tokenizer.encode("a😀", add_special_tokens=False).ids
    assert len(ids) == 5

    def finish(generation: FakeGeneration) -> None:
        generation.push(ids[3:], finish=FinishReason.LENGTH)

    backend.script = finish
    body = (await call(app, TEXT, {"prompt": ids[:3], "echo": True})).json
    assert body["choices"][0]["text"] == "a😀"


async def test_a_stop_string_is_not_looked_for_in_the_prompt(app: App, backend: FakeBackend) -> None:
    backend.script = script
    body = (await call(app, TEXT, {"prompt": "stop", "echo": True, "stop": ["stop", "opz"]})).json
    assert body["choices"][0]["text"] == "stopz"


async def test_the_space_that_encoding_adds_is_not_echoed(
    backend: FakeBackend, sentencepiece: TextCodec
) -> None:
    backend.script = lambda generation: generation.push([5], finish=FinishReason.LENGTH)
    app = build_app(backend, sentencepiece)
    body = (await call(app, TEXT, {"prompt": "hello world", "echo": True, "max_tokens": 0})).json
    assert body["choices"][0]["text"] == "hello world"


def test_special_tokens_are_echoed_only_when_asked_for(byte_level: TextCodec) -> None:
    ids = [IM_START, app_token(ord("a"))]
    hidden = EchoedPrompt.of(ids, byte_level.pieces, skip_special_tokens=True)
    shown = EchoedPrompt.of(ids, byte_level.pieces, skip_special_tokens=False)
    assert (hidden.text, hidden.offsets) == ("a", (0, 0))
    assert (shown.text, shown.offsets) == ("<|im_start|>a", (0, 12))


async def test_logprobs_of_an_attempt_that_failed_half_way_are_dropped(
    app: App, backend: FakeBackend
) -> None:
    def resumed(generation: FakeGeneration) -> None:
        parts = [TokenLogprobs(-1.0)], [TokenLogprobs(-2.0), TokenLogprobs(-3.0)]
        generation.push(prompt_logprobs=parts[0])
        generation.push(
            [app_token(ord("z"))],
            attempt=1,
            finish=FinishReason.LENGTH,
            logprobs=[TokenLogprobs(-7.0)],
            prompt_logprobs=parts[1],
        )

    backend.script = resumed
    body = (await call(app, TEXT, {"prompt": "abc", "echo": True, "logprobs": 0})).json
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -2.0, -3.0, -7.0]
