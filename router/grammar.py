"""Structured output: what a request says about the form of its answer -> the grammar that a replica follows.

The grammar is built and checked here, before admission, with the library and the limits of the replica
(replicas/constraints.py): what passes here is not refused there.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, grammar_from
from msgspec import Raw

from replicas.api import GRAMMAR_LIMITS
from router.errors import ApiError, bad_value
from router.protocol import ABSENT, GenerationBody, ResponseFormat

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Of a schema, expression or grammar as the client wrote it; checking one of this size takes 15 ms."""
WHITE_SPACE: Final = r"[ \n]{0,20}"
"""Between the parts of a JSON document. Models that may do more can do it for ever (vllm#45346)."""
_SCHEMA_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_LIMITS: Final = LLParserLimits(**GRAMMAR_LIMITS)
_ANY_OBJECT: Final = '{"type": "object"}'

_Sources = dict[str, Callable[[], str]]
"""Field -> what makes its grammar."""


def output_grammar(body: GenerationBody) -> str:
    """Return the grammar that the request's fields ask for; "" = none. Raises ApiError 400."""
    sources = _sources(body)
    if not sources:
        return ""
    if len(sources) > 1:
        first, second, *_ = sources
        raise bad_value(second, f"{second} cannot be combined with {first}")
    [(param, make)] = sources.items()
    check_combination(body, param)
    return make()


def check_combination(body: GenerationBody, param: str) -> None:
    """Raise a 400 for fields that contradict a grammar: they forbid the end that it demands."""
    for field, is_set in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if is_set:
            raise bad_value(field, f"{field} cannot be combined with {param}")


def schema_grammar(schema: str, param: str) -> str:
    """Return the grammar of a JSON schema. Raises ApiError 400, which names what is not supported."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            schema,
            overrides={"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False},
        )
    except (ValueError, RecursionError):
        raise bad_value(param, f"{param} is not a JSON schema that can be followed") from None
    if reason := _fault(grammar):
        raise bad_value(param, f"{param} cannot be followed: {reason}")
    return grammar


def checked(grammar: str, param: str, what: str) -> str:
    """Return `grammar` if it compiles within the limits. Raises ApiError 400."""
    if _fault(grammar):
        raise bad_value(param, f"{param} is not {what} that can be followed")
    return grammar


def check_size(text: str | bytes, param: str) -> None:
    """Raise a 400 for what is too long to be compiled."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise bad_value(param, f"{param} must not have more than {MAX_GRAMMAR_BYTES} bytes")


def _sources(body: GenerationBody) -> _Sources:
    found: _Sources = {}
    if body.response_format is not None:
        _note_response_format(found, body.response_format)
    _note_all(found, "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if (options := body.structured_outputs) is not None:
        prefix = "structured_outputs."
        _note_all(found, prefix, options.json, options.regex, options.choice, options.grammar)
        _note(found, prefix + "json_object", _ANY_OBJECT if options.json_object else None, _json)
    return found


def _note_all(
    found: _Sources,
    prefix: str,
    schema: Raw,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> None:
    _note(found, prefix + "json", _schema_text(schema, prefix + "json"), _json)
    _note(found, prefix + "regex", regex, _regex)
    _note(found, prefix + "choice", choice, _choice)
    _note(found, prefix + "grammar", grammar, _grammar)


def _note(found: _Sources, param: str, value: Any, make: Callable[[Any, str], str]) -> None:
    if value is not None:
        found[param] = lambda: make(value, param)


def _note_response_format(found: _Sources, wanted: ResponseFormat) -> None:
    if wanted.type == "json_schema":
        param = "response_format.json_schema"
        inner = wanted.json_schema
        if inner is None or inner.schema is ABSENT:
            missing = param if inner is None else f"{param}.schema"
            message = f"Missing required field: {missing}"
            raise ApiError(400, message, param=missing, code="missing_required_parameter")
        if not _SCHEMA_NAME.match(inner.name):
            raise bad_value(f"{param}.name", f"{param}.name must be 1 to 64 letters, digits, _ or -")
        found[f"{param}.schema"] = lambda: _json(bytes(inner.schema).decode(), f"{param}.schema")
        return
    if wanted.json_schema is not None:
        raise bad_value("response_format.json_schema", "json_schema belongs to the type json_schema")
    if wanted.type == "json_object":
        found["response_format"] = lambda: _json(_ANY_OBJECT, "response_format")
    elif wanted.type != "text":
        raise bad_value(
            "response_format.type", "response_format.type must be text, json_object or json_schema"
        )


def _schema_text(raw: Raw, param: str) -> str | None:
    """Return a schema as JSON; it may come as an object or, as vLLM takes it, as a string of JSON."""
    if raw is ABSENT:
        return None
    check_size(bytes(raw), param)
    value = msgspec.json.decode(raw)
    if value is None or isinstance(value, str):
        return value
    return bytes(raw).decode()


def _json(schema: str, param: str) -> str:
    check_size(schema, param)
    return schema_grammar(schema, param)


def _regex(pattern: str, param: str) -> str:
    check_size(pattern, param)
    return checked(LLMatcher.grammar_from_regex(pattern), param, "a regular expression")


def _choice(choices: list[str], param: str) -> str:
    check_size("".join(choices), param)
    if not all(choices) or not choices:
        raise bad_value(param, f"{param} must hold at least one string, and no empty one")
    return checked("start: " + " | ".join(map(json.dumps, choices)), param, "a choice")


def _grammar(text: str, param: str) -> str:
    check_size(text, param)
    if text.lstrip().startswith("{"):
        # llguidance's own form could carry options that undo the limits on white space.
        raise bad_value(param, f"{param} must be a Lark or GBNF grammar")
    try:
        lark = grammar_from("grammar", text)
    except (ValueError, RecursionError):
        raise bad_value(param, f"{param} is not a grammar that can be followed") from None
    return checked(lark, param, "a grammar")


def _fault(grammar: str) -> str:
    """Return why a grammar does not compile, in bounded words; "" = it does."""
    return LLMatcher.validate_grammar(grammar, limits=_LIMITS).strip().partition("\n")[0][:200]
