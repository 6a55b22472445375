"""The form of an answer: what a request says -> the grammar asked of the replica, or a 400."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.app import App
from router.grammar import MAX_GRAMMAR_BYTES
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, TEXT, call
from tests.router.fake_backend import FakeBackend

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def by_schema(schema: Any, **more: Any) -> dict[str, Any]:
    inner = {"name": "answer", "schema": schema} | more
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


@pytest.fixture
def accepts(app: App, backend: FakeBackend, byte_level: TextCodec, say: Any) -> Any:
    """Whether the grammar that a request leads to takes a text as a whole answer."""
    backend.script = say("x")
    vocabulary = LLTokenizer(byte_level.tokenizer.to_str(), eos_token=[1])

    async def accepted(fields: dict[str, Any], text: str, path: str = CHAT) -> bool:
        asked = HI if path == CHAT else {"prompt": "x"}
        done = await call(app, path, asked | fields)
        assert done.status == 200, done.raw
        matcher = LLMatcher(vocabulary, backend.generations[-1].sampling.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = byte_level.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepted


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[1]"),
        (by_schema(POINT), '{"x": 1, "y": -2}', '{"x": 1}'),
        (by_schema(POINT, strict=False, description="d"), '{"x":1,"y":2}', '{"x":"1","y":2}'),
        ({"guided_json": POINT}, '{"x": 1, "y": 2}', '{"y": 1}'),
        ({"guided_json": json.dumps(POINT)}, '{"x": 1, "y": 2}', "{}"),
        ({"structured_outputs": {"json": POINT}}, '{"x": 1, "y": 2}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"guided_regex": "a{2}[bc]"}, "aab", "aad"),
        ({"structured_outputs": {"regex": "a|bb"}}, "bb", "b"),
        ({"guided_choice": ["yes", 'n"o\n']}, 'n"o\n', "no"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes", "y"),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12", "a"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "a"),
    ],
)
async def test_the_answer_must_have_the_form_asked_for(
    accepts: Any, fields: dict[str, Any], good: str, bad: str
) -> None:
    for path in (CHAT, TEXT):
        assert await accepts(fields, good, path)
        assert not await accepts(fields, bad, path)


async def test_white_space_is_bounded(accepts: Any) -> None:
    fields = by_schema(POINT | {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}})
    assert await accepts(fields, '{\n  "x": 1,\n  "y": 2\n}')
    assert not await accepts(fields, '{"x":' + " " * 21 + '1,"y":2}')


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"structured_outputs": {}}]
)
async def test_without_a_form_there_is_no_grammar(
    app: App, backend: FakeBackend, say: Any, fields: dict[str, Any]
) -> None:
    backend.script = say("x")
    assert (await call(app, CHAT, HI | fields)).status == 200
    assert backend.generations[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": ""}, "response_format"),
        ({"response_format": {"json_object": False}}, "response_format.json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (by_schema(POINT, name="a b"), "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
        ),
        (by_schema({"type": "strin"}), "response_format.json_schema.schema"),
        (by_schema([]), "response_format.json_schema.schema"),
        (by_schema({"not": {"type": "string"}}), "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": "start: b"}, "guided_grammar"),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar"),
        ({"guided_grammar": "start: " + "(" * 5000}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
async def test_what_cannot_be_followed_is_refused_before_admission(
    app: App, backend: FakeBackend, fields: dict[str, Any], param: str
) -> None:
    refused = await call(app, CHAT, HI | fields)
    assert refused.status == 400
    assert refused.error["param"].startswith(param.partition(".")[0])
    assert param in (refused.error["param"], f"{refused.error['param']}.json_object")
    assert not backend.generations


async def test_a_keyword_that_is_not_supported_is_named(app: App) -> None:
    refused = await call(app, CHAT, HI | by_schema({"type": "object", "not": {}}))
    assert "not" in refused.error["message"]
