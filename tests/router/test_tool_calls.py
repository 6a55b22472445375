"""Tool calls found in text, however the text is cut into pieces."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tool_calls import Part, ToolCallParser
from router.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat, format_of_template

FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
NAMES = frozenset({"f", "get_weather"})
A = {"city": 'Pa"r}is\\', "days": [1, {"x": None}]}


def written(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [form.call(name, json.dumps(arguments)) for name, arguments in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    return "; ".join(bodies) if form is LLAMA3 else f"[TOOL_CALLS][{', '.join(bodies)}]"


def parse(
    form: ToolFormat, pieces: list[str], parallel: bool = True
) -> tuple[str, list[tuple[str | None, str]]]:
    """The text and the calls of an answer."""
    parser = ToolCallParser(form, NAMES, parallel=parallel)
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)] + parser.flush()
    calls: dict[int, list[Part]] = {}
    for part in parts:
        if part.call is not None:
            calls.setdefault(part.call, []).append(part)
    assert sorted(calls) == list(range(len(calls)))
    for of_call in calls.values():
        assert [part.name is not None for part in of_call] == [True] + [False] * (len(of_call) - 1)
    text = "".join(part.text for part in parts)
    return text, [(of[0].name, "".join(part.arguments for part in of)) for of in calls.values()]


def cut(draw: st.DataObject, text: str) -> list[str]:
    places = sorted(draw.draw(st.sets(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_calls_are_found_wherever_the_text_is_cut(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    text = written(form, ("f", {}), ("get_weather", A))
    found, calls = parse(form, cut(data, text))
    assert found == ""
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [
        ("f", {}),
        ("get_weather", A),
    ]


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_text_before_a_call_is_text(form: ToolFormat, data: st.DataObject) -> None:
    found, calls = parse(form, cut(data, "Let me < look.\n\n" + written(form, ("f", A))))
    assert found == "Let me < look."
    assert [called for called, _ in calls] == ["f"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "plain",
        " spaces  and\nlines\n",
        "a < b <tool_ [TOOL_ }",
        '{"name": "unknown", "arguments": {}}',
        '{"a": 1}',
        "{not json}",
        '{"name": "f", "argum',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> and more',
        "<tool_call>\nhello",
        "[TOOL_CALLS] no",
        "[TOOL_CALLS][5]",
    ],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_no_call_stays_as_it_is(name: str, text: str, data: st.DataObject) -> None:
    assert parse(FORMATS[name], cut(data, text)) == (text, [])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES, parallel=True)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.feed("{") == [Part(call=0, name="f"), Part(call=0, arguments="{")]
    assert parser.feed('"a": 1') == [Part(call=0, arguments='"a": 1')]
    assert parser.feed("}}") == [Part(call=0, arguments="}")]
    assert parser.num_calls == 1


def test_a_call_whose_arguments_come_first_is_found() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert parse(HERMES, [text]) == ("", [("f", '{"a": 1}')])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_answer_cut_off_in_a_call_keeps_the_beginning(data: st.DataObject) -> None:
    text = written(HERMES, ("f", A))[:60]
    found, [(called, arguments)] = parse(HERMES, cut(data, text))
    assert (found, called) == ("", "f")
    assert json.dumps(A).startswith(arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_calls_there_is_one(name: str) -> None:
    form = FORMATS[name]
    _, calls = parse(form, [written(form, ("f", {}), ("f", A))], parallel=False)
    assert calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ messages }}", HERMES),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ('{% if tools %}{"name": f, "parameters": {}}{% endif %}', LLAMA3),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}", MISTRAL),
    ],
)
def test_the_template_tells_the_format(source: str, form: ToolFormat) -> None:
    assert format_of_template(source) is form
