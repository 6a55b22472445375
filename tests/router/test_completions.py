"""What is asked of the backend, what is answered, and what is refused before anything is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicas.api import FinishReason, TokenLogprobs
from router.access_log import AccessLine
from router.app import App, build_app
from router.callers import Caller, everybody
from router.errors import ApiError
from router.tenants import Tier
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, TEXT, begin, call
from tests.router.fake_backend import CARD, FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import app_token, byte_level_folder


async def test_a_chat_is_answered(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("Paris 😀", cached=3)
    body = (await call(app, CHAT, HI)).json
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris 😀", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt, completion = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    assert prompt == len(backend.generations[0].prompt_ids)
    assert completion == len(["Pa", "ris", " ", *"😀".encode(), "eos"])
    assert body["usage"]["total_tokens"] == prompt + completion
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["model"] == "tiny"
    assert body["object"] == "chat.completion"


async def test_a_stream_and_a_whole_answer_say_the_same(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("hello 😀 world")
    whole = (await call(app, CHAT, HI)).json
    events = (await call(app, CHAT, HI | {"stream": True, "stream_options": {"include_usage": True}})).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "hello 😀 world"
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"] == whole["usage"]
    assert {event["usage"] for event in events[:-1]} == {None}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_wait_in_the_router_is_told_and_logged(
    backend: FakeBackend, byte_level: TextCodec, say: Any, stream: bool
) -> None:
    lines: list[AccessLine] = []
    backend.script = say("hello")
    answer = await call(build_app(backend, byte_level, access=lines.append), CHAT, HI | {"stream": stream})
    assert answer.response_headers["x-queue-wait-ms"] == "12.5"
    assert lines[0].queue_wait_ms == 12.5


async def test_the_wire_form_of_a_stream(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("a\u2028b\n")
    done = await call(app, CHAT, HI | {"stream": True})
    assert done.response_headers["content-type"] == "text/event-stream; charset=utf-8"
    assert done.response_headers["cache-control"] == "no-cache"
    assert "content-length" not in done.response_headers
    assert b"\r" not in done.raw
    *events, end = done.raw.decode().split("\n\n")[:-1]
    assert end == "data: [DONE]"
    assert all(event.startswith("data: {") and len(event.splitlines()) == 1 for event in events)
    assert "usage" not in done.raw.decode()


async def test_every_token_is_sent_when_it_comes(app: App, backend: FakeBackend) -> None:
    run = begin(app, TEXT, {"prompt": "x", "stream": True})
    generation = await backend.started()
    for char in b"ab":
        generation.push([app_token(char)])
        chunk = await run.next_chunk()
        assert chunk is not None
        assert f'"text":"{chr(char)}"'.encode() in chunk
    generation.stop()
    assert (await run.finish()).events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_several_prompts_and_samples_are_numbered(app: App, backend: FakeBackend) -> None:
    def script(generation: FakeGeneration) -> None:
        letter = generation.prompt_ids[0]
        # The outputs end in reverse order and with different lengths and reasons.
        generation.push([letter, letter], index=1, finish=FinishReason.LENGTH)
        generation.push([letter], index=0)
        generation.stop(index=0)

    backend.script = script
    request = {"prompt": ["a", "b", "c"], "n": 2}
    body = (await call(app, TEXT, request)).json
    found = [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]]
    expected = []
    for prompt, letter in enumerate("abc"):
        expected += [(2 * prompt, letter, "stop"), (2 * prompt + 1, letter * 2, "length")]
    assert found == expected
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 3 * (2 + 2)

    events = (await call(app, TEXT, request | {"stream": True})).events
    texts = dict.fromkeys(range(6), "")
    reasons = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    assert [(i, texts[i], reasons[i]) for i in range(6)] == expected


async def test_n_is_one_request_with_n_outputs(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    body = (await call(app, CHAT, HI | {"n": 3})).json
    assert [generation.n for generation in backend.generations] == [3]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]


async def test_outputs_that_find_their_siblings_prefix_do_not_count_as_cached(
    app: App, backend: FakeBackend
) -> None:
    def script(generation: FakeGeneration) -> None:
        for index, cached in enumerate((4, 9)):
            generation.push([app_token(ord("a"))], index=index, cached=cached, finish=FinishReason.LENGTH)

    backend.script = script
    body = (await call(app, TEXT, {"prompt": ["x", "y"], "n": 2})).json
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_token_ids_are_taken_as_they_are(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    await call(app, TEXT, {"prompt": [5, 6, 319]})
    await call(app, TEXT, {"prompt": [[5], [6, 7]]})
    assert [g.prompt_ids for g in backend.generations] == [(5, 6, 319), (5,), (6, 7)]


async def test_a_stop_string_ends_the_generation(app: App, backend: FakeBackend) -> None:
    run = begin(app, TEXT, {"prompt": "x", "stop": ["bc"], "stream": True})
    generation = await backend.started()
    generation.push([app_token(char) for char in b"ab"])
    generation.push([app_token(char) for char in b"cd"])
    events = (await run.finish()).events
    assert [event["choices"][0]["text"] for event in events] == ["a", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert generation.aborted.is_set()


async def test_a_stop_string_of_one_output_leaves_the_others(app: App, backend: FakeBackend) -> None:
    run = begin(app, TEXT, {"prompt": "x", "stop": "b", "n": 2})
    generation = await backend.started()
    generation.push([app_token(ord("b"))], index=0)
    generation.push([app_token(ord("z"))], index=0)
    generation.push([app_token(ord("a"))], index=1)
    generation.push([app_token(ord("b"))], index=1)
    body = (await run.finish()).json
    assert generation.aborted_outputs == [0, 1]
    assert [choice["text"] for choice in body["choices"]] == ["", "a"]
    assert body["usage"]["completion_tokens"] == 3
    assert generation.aborted.is_set()


async def test_logprobs_are_streamed_with_their_text(app: App, backend: FakeBackend) -> None:
    def script(generation: FakeGeneration) -> None:
        assert generation.sampling.logprobs == 0
        generation.push([app_token(ord("a"))], logprobs=[TokenLogprobs(-0.5)])
        generation.push([1], finish=FinishReason.STOP, stop_token_id=1, logprobs=[TokenLogprobs(-1.0)])

    backend.script = script
    events = (await call(app, CHAT, HI | {"stream": True, "logprobs": True})).events
    contents = [event["choices"][0]["logprobs"] for event in events]
    assert [entry and [e["token"] for e in entry["content"]] for entry in contents] == [None, ["a"], None]


async def test_a_seed_is_drawn_per_prompt_unless_given(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    await call(app, TEXT, {"prompt": ["a", "b"]})
    await call(app, TEXT, {"prompt": ["a", "b"], "seed": 4})
    seeds = [generation.sampling.seed for generation in backend.generations]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [4, 4]


async def test_priority_can_only_lower(backend: FakeBackend, byte_level: TextCodec, say: Any) -> None:
    app = build_app(backend, byte_level, identify=lambda _: Caller(tier=1, cache_salt="s"))
    backend.script = say("x")
    for priority in (None, 0, 2):
        await call(app, CHAT, HI | {"priority": priority})
    assert [g.tier for g in backend.generations] == [1, 1, 2]
    assert {g.cache_salt for g in backend.generations} == {"s"}


@pytest.mark.parametrize("priority", [-1, 1, 3, 10**30])
async def test_a_priority_that_no_tier_has_is_refused(
    backend: FakeBackend, byte_level: TextCodec, priority: int
) -> None:
    tiers = (Tier(name="fast", level=0), Tier(name="slow", level=2))
    app = build_app(backend, byte_level, identify=everybody(tiers))
    refused = await call(app, CHAT, HI | {"priority": priority})
    assert (refused.status, refused.error["param"]) == (400, "priority")
    assert "0, 2" in refused.error["message"]
    assert not backend.generations


async def test_a_caller_that_is_refused_starts_nothing(backend: FakeBackend, byte_level: TextCodec) -> None:
    def identify(headers: Mapping[bytes, bytes]) -> Caller:
        assert headers[b"content-type"] == b"application/json"
        raise ApiError(401, "no key", code="invalid_api_key")

    app = build_app(backend, byte_level, identify=identify)
    assert (await call(app, CHAT, HI)).status == 401
    assert not backend.generations


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [[5], []], ["a", ""], [[5], "a"], [5, "a"], [5, [5]], [True], [None]]
)
async def test_empty_and_mixed_prompts_are_refused(app: App, backend: FakeBackend, prompt: Any) -> None:
    refused = await call(app, TEXT, {"prompt": prompt})
    assert refused.status == 400
    assert refused.error["param"].startswith("prompt")
    assert not backend.generations


async def test_an_empty_prompt_of_a_tokenizer_with_bos_is_its_bos(
    backend: FakeBackend, sentencepiece: TextCodec, say: Any
) -> None:
    backend.script = say("")
    assert (await call(build_app(backend, sentencepiece), TEXT, {"prompt": ""})).status == 200
    assert backend.generations[0].prompt_ids == (1,)


@pytest.mark.parametrize(
    ("prompt", "named"), [([-1], "-1"), ([[5, -3]], "-3"), ([320], "320"), ([10**19], str(10**19))]
)
async def test_token_ids_outside_of_the_vocabulary_are_named(app: App, prompt: Any, named: str) -> None:
    refused = await call(app, TEXT, {"prompt": prompt})
    assert refused.status == 400
    assert named in refused.error["message"]
    assert "[0, 319]" in refused.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [5] * 256}),
        (TEXT, {"prompt": "x" * 100_000}),
        (TEXT, {"prompt": ["x", "z" * 300]}),
        (CHAT, {"messages": [{"role": "user", "content": "z" * 300}]}),
        (TEXT, {"prompt": [5] * 250, "max_tokens": 7}),
        (CHAT, HI | {"max_tokens": 256}),
        (CHAT, HI | {"max_completion_tokens": 256}),
    ],
)
async def test_what_exceeds_the_context_is_refused(
    app: App, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    refused = await call(app, path, body)
    assert refused.status == 400
    assert refused.error["code"] == "context_length_exceeded"
    assert refused.error["param"] == ("messages" if path == CHAT else "prompt")
    assert "256" in refused.error["message"]
    assert not backend.generations


async def test_too_many_choices_are_refused_before_tokenising(app: App) -> None:
    refused = await call(app, TEXT, {"prompt": ["a"] * 9, "n": 128})
    assert (refused.status, refused.error["param"]) == (400, "prompt")


async def test_an_unknown_model_is_not_served(app: App) -> None:
    refused = await call(app, CHAT, HI | {"model": "gpt-4"})
    assert (refused.status, refused.error["param"]) == (404, "model")


async def test_a_chat_without_a_template_is_refused(backend: FakeBackend, tmp_path: Path) -> None:
    codec = TextCodec.from_folder(byte_level_folder(tmp_path, chat_template=None))
    refused = await call(build_app(backend, codec), CHAT, HI)
    assert (refused.status, refused.error["param"]) == (400, "messages")


async def test_a_template_that_refuses_is_a_400(backend: FakeBackend, sentencepiece: TextCodec) -> None:
    messages = [{"role": "system", "content": "x"}]
    refused = await call(build_app(backend, sentencepiece), CHAT, {"messages": messages})
    assert refused.status == 400
    assert "Only user and assistant roles" in refused.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_replicas_the_answer_is_503(app: App, backend: FakeBackend, stream: bool) -> None:
    for card, full in ((None, False), (CARD, True)):
        backend.card, backend.full = card, full
        refused = await call(app, CHAT, HI | {"stream": stream})
        assert (refused.status, refused.error["code"]) == (503, "no_replica")
        assert int(refused.response_headers["retry-after"]) >= 1


async def test_prompts_already_started_are_ended_when_one_cannot_start(
    app: App, backend: FakeBackend
) -> None:
    def script(_: FakeGeneration) -> None:
        backend.full = len(backend.generations) == 2

    backend.script = script
    assert (await call(app, TEXT, {"prompt": ["a", "b", "c"]})).status == 503
    assert [generation.aborted.is_set() for generation in backend.generations] == [True, True]
