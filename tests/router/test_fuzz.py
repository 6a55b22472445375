"""Any JSON in any field: never a 500, always an OpenAI error object, the server goes on."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicas.api import FinishReason
from router.app import App, build_app
from router.protocol import ChatBody, CompletionBody
from router.text import TextCodec
from tests.router.asgi_client import CHAT, TEXT, call
from tests.router.fake_backend import FakeBackend, FakeGeneration
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
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
            "content": st.text(max_size=8)
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)})),
        },
        optional={"name": st.text(max_size=4), "refusal": st.none(), "tool_calls": st.just([])},
    ),
    max_size=3,
)
prompts = st.text(max_size=20) | st.lists(st.integers(-1, 330), max_size=5)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "tiny", "other"]),
    "stream": st.booleans(),
    "n": st.integers(-1, 4),
    "max_tokens": st.integers(-1, 300),
    "min_tokens": st.integers(-1, 20),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-2, 400),
    "seed": st.integers(-(2**65), 2**65),
    "stop": st.text(max_size=3) | st.lists(st.text("ab", max_size=3), max_size=18),
    "stop_token_ids": st.lists(st.integers(-1, 330), max_size=4),
    "logit_bias": st.dictionaries(st.integers(-1, 330).map(str), st.floats(-110, 110), max_size=3),
    "logprobs": st.booleans() | st.integers(-1, 6),
    "top_logprobs": st.integers(-1, 21),
    "repetition_penalty": st.floats(0, 200),
    "priority": st.integers(-1, 4),
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
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
    for index in range(generation.n):
        generation.push([app_token(ord("a"))], index=index)
        generation.push(index=index, finish=FinishReason.LENGTH)


@pytest.fixture(scope="module")
def app(byte_level: TextCodec) -> App:
    return build_app(FakeBackend(answer_at_once), byte_level)


async def check(app: App, path: str, body: bytes) -> None:
    done = await call(app, path, body)
    assert done.complete
    if done.status == 200:
        assert done.raw
        return
    assert done.status in (400, 404, 413)
    assert done.error["message"]
    assert len(done.raw) < MAX_ERROR_BYTES


often = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@often
@given(body=chat_bodies)
async def test_any_chat_body(app: App, body: Any) -> None:
    await check(app, CHAT, json.dumps(body).encode())


@often
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
