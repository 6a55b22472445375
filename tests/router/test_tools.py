"""Tools end to end: what the model is told, what it must say, and what the client gets."""

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from replicas.api import FinishReason
from router.app import App, build_app
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, call
from tests.router.fake_backend import CARD, FakeBackend
from tests.router.tiny_tokenizers import CHATML, byte_level_folder

F = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "does it",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/number"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"number": {"type": "integer"}},
        },
    },
}
G = {"type": "function", "function": {"name": "g"}}
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TOOLS = HI | {"tools": [F, G]}
NAMED = {"type": "function", "function": {"name": "f"}}
QWEN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<tool_call>"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.a }}{% endfor %};"
    "{% endfor %}"
)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(card=msgspec.structs.replace(CARD, max_model_len=4096))


def prompt_of(backend: FakeBackend, codec: TextCodec) -> str:
    text: str = codec.tokenizer.decode(backend.generations[-1].prompt_ids, skip_special_tokens=False)
    return text


async def test_calls_are_answered(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say(f"I look.\n{CALL_F}\n{CALL_G}")
    [choice] = (await call(app, CHAT, TOOLS)).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]) for c in calls] == [
        ("function", {"name": "f", "arguments": '{"a": 1}'}),
        ("function", {"name": "g", "arguments": "{}"}),
    ]
    assert len({c["id"] for c in calls}) == 2


async def test_calls_are_streamed(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say(f"{CALL_F}\n{CALL_G}")
    events = (await call(app, CHAT, TOOLS | {"stream": True})).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert [p["index"] for p in parts if "id" in p] == [0, 1]
    assert [p["function"]["name"] for p in parts if "id" in p] == ["f", "g"]
    first = [p["function"]["arguments"] for p in parts if p["index"] == 0]
    assert len(first) > 2
    assert "".join(first) == '{"a": 1}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)


async def test_an_answer_without_calls_is_an_ordinary_one(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("no <tool need")
    [choice] = (await call(app, CHAT, TOOLS)).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "no <tool need", "refusal": None}
    assert choice["finish_reason"] == "stop"
    events = (await call(app, CHAT, TOOLS | {"stream": True})).events
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "no <tool need"


async def test_a_call_that_max_tokens_cuts_ends_with_length(
    app: App, backend: FakeBackend, byte_level: TextCodec
) -> None:
    cut = CALL_F[: CALL_F.index("1") + 1]
    ids = byte_level.tokenizer.encode(cut, add_special_tokens=False).ids
    backend.script = lambda generation: generation.push(ids, finish=FinishReason.LENGTH)
    [choice] = (await call(app, CHAT, TOOLS)).json["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


@pytest.fixture
def accepts(app: App, backend: FakeBackend, byte_level: TextCodec, say: Any) -> Any:
    """Whether the grammar that a request leads to takes a text as a whole answer."""
    backend.script = say("x")
    vocabulary = LLTokenizer(byte_level.tokenizer.to_str(), eos_token=[1])

    async def accepted(fields: dict[str, Any], text: str) -> bool:
        done = await call(app, CHAT, TOOLS | fields)
        assert done.status == 200, done.raw
        matcher = LLMatcher(vocabulary, backend.generations[-1].sampling.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = byte_level.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepted


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, f"{CALL_F}\n{CALL_G}", "hello"),
        ({"tool_choice": "required"}, CALL_G, CALL_F.replace("1", '"1"')),
        ({"tool_choice": "required", "parallel_tool_calls": False}, CALL_F, f"{CALL_F}\n{CALL_G}"),
        ({"tool_choice": NAMED}, CALL_F, CALL_G),
        ({"tool_choice": NAMED}, CALL_F, f"{CALL_F}\n{CALL_F}"),
    ],
)
async def test_a_demanded_call_is_enforced(accepts: Any, fields: dict[str, Any], good: str, bad: str) -> None:
    assert await accepts(fields, good)
    assert not await accepts(fields, bad)


async def test_a_strict_tool_is_enforced_only_where_it_is_called(accepts: Any) -> None:
    strict = {"type": "function", "function": F["function"] | {"strict": True}}  # type: ignore[operator]
    fields = {"tools": [strict, G]}
    for good in ("hello", f"well\n{CALL_F}", f"{CALL_F} and\n{CALL_G}"):
        assert await accepts(fields, good)
    for bad in (CALL_F.replace("1", '"1"'), CALL_F.replace('"f"', '"h"')):
        assert not await accepts(fields, bad)


async def test_auto_and_none_demand_nothing(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    for choice in (None, "auto", "none"):
        assert (await call(app, CHAT, TOOLS | {"tool_choice": choice})).status == 200
        assert backend.generations[-1].sampling.grammar == ""


async def test_a_named_call_ends_with_stop(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say(CALL_F)
    [choice] = (await call(app, CHAT, TOOLS | {"tool_choice": NAMED})).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


async def test_with_tool_choice_none_a_call_is_text_and_the_model_knows_no_tools(
    app: App, backend: FakeBackend, byte_level: TextCodec, say: Any
) -> None:
    backend.script = say(CALL_F)
    [choice] = (await call(app, CHAT, TOOLS | {"tool_choice": "none"})).json["choices"]
    assert choice["message"]["content"] == CALL_F
    assert "does it" not in prompt_of(backend, byte_level)


CONVERSATION = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "done"},
]


async def test_a_template_without_tools_is_told_in_words(
    backend: FakeBackend, tmp_path: Any, say: Any
) -> None:
    backend.script = say("x")
    codec = TextCodec.from_folder(byte_level_folder(tmp_path, chat_template=CHATML))
    done = await call(build_app(backend, codec), CHAT, {"messages": CONVERSATION, "tools": [F]})
    assert done.status == 200
    prompt = prompt_of(backend, codec)
    assert json.dumps(F) in prompt
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 7}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\ndone\n</tool_response>" in prompt


async def test_a_template_with_tools_gets_them_as_they_are(
    backend: FakeBackend, tmp_path: Any, say: Any
) -> None:
    backend.script = say("x")
    codec = TextCodec.from_folder(byte_level_folder(tmp_path, chat_template=QWEN))
    done = await call(build_app(backend, codec), CHAT, {"messages": CONVERSATION, "tools": [F]})
    assert done.status == 200
    prompt = prompt_of(backend, codec)
    assert prompt.startswith(json.dumps(F))
    assert "user:x;assistant:f=7;tool:done;" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F, F]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [G] * 129}, "tools"),
        ({"tools": [F], "tool_choice": "f"}, "tool_choice"),
        ({"tools": [G], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [F], "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [F], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": CONVERSATION[1]["tool_calls"]}]},
            "messages[0].tool_calls",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_what_cannot_be_called_is_refused(
    app: App, backend: FakeBackend, fields: dict[str, Any], param: str
) -> None:
    refused = await call(app, CHAT, HI | fields)
    assert (refused.status, refused.error["param"]) == (400, param)
    assert not backend.generations
