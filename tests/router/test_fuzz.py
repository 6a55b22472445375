"""Any JSON in any field: never a 500, always an OpenAI error object, the server goes on."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicas.api import FinishReason, TokenLogprobs
from router.app import App, build_app
from router.protocol import ChatBody, CompletionBody
from router.text import TextCodec
from tests.router.asgi_client import CHAT, TEXT, call
from tests.router.fake_backend import CARD, FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import app_token

MAX_ERROR_BYTES = 2000

numbers = (
    st.sampled_from([0, 1, -1, 2, 16, 255, 256, 10**19, -(10**30), 1e308, 0.5, -0.0]) | st.integers()
) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
words = st.sampled_from(["user", "system", "text", "type", "content", "role", "1", "include_usage"])
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
calls = st.fixed_dictionaries(
    {
        "id": st.text(max_size=4),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", ""]), "arguments": st.sampled_from(["{}", '{"a": 1}', "{", "[]"])}
        ),
    },
    optional={"type": st.sampled_from(["function", "other"])},
)
contents = st.text(max_size=8) | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}), max_size=2
)
spoken = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": contents},
    optional={"name": st.text(max_size=4), "refusal": st.none(), "tool_calls": st.just([])},
)
called = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | contents, "tool_calls": st.lists(calls, max_size=2)}
)
answered = st.fixed_dictionaries(
    {"role": st.just("tool"), "content": contents, "tool_call_id": st.text(max_size=4)}
)
messages: st.SearchStrategy[Any] = st.lists(spoken | called | answered, min_size=1, max_size=3)
prompts = st.text(max_size=20) | st.lists(st.integers(-1, 330), max_size=5)
flags = st.booleans()
schemas = anything | st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3},
        {"type": "strin"},
        {"not": {}},
        {"$ref": "#/nowhere"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"pattern": "("},
    ]
)
regexes = st.text("ab()[]*+?{}|\\019^$.,-", max_size=8) | st.sampled_from(["[a-z]{3}", "(a{1000}){1000}"])
grammars = st.text('start: |"a/\n', max_size=12) | st.sampled_from(
    ['start: "a"', 'root ::= "a" [0-9]+', "start: b", "start: start", "start: " + "(" * 500]
)
choices = st.lists(st.text(max_size=4), max_size=3)
formats = st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | st.fixed_dictionaries(
    {
        "type": st.just("json_schema"),
        "json_schema": st.fixed_dictionaries(
            {"name": st.sampled_from(["a", "a b"]), "schema": schemas}, optional={"strict": flags}
        ),
    }
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "f g", ""])},
    optional={"parameters": schemas, "strict": flags, "description": st.text(max_size=4)},
)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "tiny", "other"]),
    "stream": flags,
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": flags, "continuous_usage_stats": flags, "include_obfuscation": flags}
    ),
    "n": st.integers(-1, 4),
    "best_of": st.integers(-1, 4),
    "max_tokens": st.integers(-1, 300),
    "max_completion_tokens": st.integers(-1, 300),
    "min_tokens": st.integers(-1, 20),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-2, 400),
    "min_p": st.floats(-0.1, 1.1),
    "seed": st.integers(-(2**65), 2**65),
    "stop": st.text(max_size=3) | st.lists(st.text("ab", max_size=3), max_size=18),
    "stop_token_ids": st.lists(st.integers(-1, 330), max_size=4),
    "include_stop_str_in_output": flags,
    "ignore_eos": flags,
    "skip_special_tokens": flags,
    "add_special_tokens": flags,
    "logit_bias": st.dictionaries(st.integers(-1, 330).map(str), st.floats(-110, 110), max_size=3),
    "logprobs": flags | st.integers(-1, 6),
    "top_logprobs": st.integers(-1, 21),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(0, 200),
    "priority": st.integers(-1, 4),
    "user": st.text(max_size=4),
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    "echo": flags,
    "suffix": st.sampled_from(["", None]),
    "response_format": formats,
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "json": schemas,
            "regex": regexes,
            "choice": choices,
            "grammar": grammars,
            "json_object": flags,
        },
    ),
    "guided_json": schemas,
    "guided_regex": regexes,
    "guided_choice": choices,
    "guided_grammar": grammars,
    "tools": st.lists(
        st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=2
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required", "other"])
    | st.sampled_from(["f", "nobody"]).map(lambda name: {"type": "function", "function": {"name": name}}),
    "parallel_tool_calls": flags,
    "add_generation_prompt": flags,
    "continue_final_message": flags,
    "chat_template_kwargs": st.dictionaries(words | st.text(max_size=4), scalars, max_size=2),
}


@st.composite
def bodies(
    draw: st.DrawFn, fields: tuple[str, ...], name: str, content: st.SearchStrategy[Any]
) -> dict[str, Any]:
    """Draw a plausible body in which up to two fields may hold anything."""
    names = st.sampled_from([field for field in fields if field in plausible])
    body = {name: draw(content)}
    body |= {field: draw(plausible[field]) for field in draw(st.sets(names, max_size=5))}
    body |= {field: draw(anything) for field in draw(st.sets(st.sampled_from(fields), max_size=2))}
    return body


chat_bodies = bodies(ChatBody.__struct_fields__, "messages", messages)
text_bodies = bodies(CompletionBody.__struct_fields__, "prompt", prompts)


def answer_at_once(generation: FakeGeneration) -> None:
    """Say "a", with the logprobs asked for, and end with the first stop token there is."""
    sampling = generation.sampling
    ids = [app_token(ord("a")), *sampling.stop_token_ids[:1]]
    prompt = [TokenLogprobs(-1.0)] * (len(generation.prompt_ids) - 1)
    for index in range(generation.n):
        generation.push(
            ids,
            index=index,
            finish=FinishReason.STOP if sampling.stop_token_ids else FinishReason.LENGTH,
            stop_token_id=ids[1] if sampling.stop_token_ids else None,
            logprobs=None if sampling.logprobs is None else [TokenLogprobs(-1.0)] * len(ids),
            prompt_logprobs=None if sampling.prompt_logprobs is None else prompt,
        )


@pytest.fixture(scope="module")
def app(byte_level: TextCodec) -> App:
    roomy = msgspec.structs.replace(CARD, max_model_len=4096)
    return build_app(FakeBackend(answer_at_once, roomy), byte_level)


async def check(app: App, path: str, body: bytes) -> None:
    done = await call(app, path, body)
    assert done.complete
    if done.status == 200:
        is_stream = done.response_headers["content-type"].startswith("text/event-stream")
        assert done.events if is_stream else done.json["choices"]
        return
    assert done.status in (400, 404, 413)
    assert done.error["message"]
    assert len(done.raw) < MAX_ERROR_BYTES


QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
most = settings(QUIET, max_examples=900)
often = settings(QUIET, max_examples=200)


@most
@given(body=chat_bodies)
async def test_any_chat_body(app: App, body: Any) -> None:
    await check(app, CHAT, json.dumps(body).encode())


@most
@given(body=text_bodies)
async def test_any_completion_body(app: App, body: Any) -> None:
    await check(app, TEXT, json.dumps(body).encode())


@often
@given(body=anything, path=st.sampled_from([CHAT, TEXT]))
async def test_any_json(app: App, path: str, body: Any) -> None:
    await check(app, path, json.dumps(body).encode())


@often
@given(body=text_bodies, data=st.data())
async def test_damaged_json(app: App, body: Any, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(body).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position] = data.draw(st.integers(0, 255))
    await check(app, TEXT, bytes(raw))


@given(body=st.binary(max_size=50), path=st.sampled_from([CHAT, TEXT]))
async def test_any_bytes(app: App, path: str, body: bytes) -> None:
    await check(app, path, body)
