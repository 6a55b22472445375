"""The OpenAPI document, made from the types that decode and encode, and a page that shows it."""

import html
import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

from router.answers import ChatCompletion, ModelEntry, ModelList, TextCompletion
from router.protocol import ChatBody, CompletionBody
from router.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized

_REFUSALS: Final = (400, 401, 403, 404, 413, 429, 500, 503)


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every refusal."""

    error: ErrorDetail


class Status(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    method: str
    path: str
    summary: str
    body: type | None = None
    answer: type
    streams: bool = False


_OPERATIONS: Final = (
    _Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a chat, whole or streamed",
        body=ChatBody,
        answer=ChatCompletion,
        streams=True,
    ),
    _Operation(
        method="post",
        path="/v1/completions",
        summary="Complete a text, whole or streamed",
        body=CompletionBody,
        answer=TextCompletion,
        streams=True,
    ),
    _Operation(method="get", path="/v1/models", summary="List the served model", answer=ModelList),
    _Operation(
        method="get", path="/v1/models/{model}", summary="Describe the served model", answer=ModelEntry
    ),
    _Operation(
        method="post", path="/tokenize", summary="Count and list tokens", body=TokenizeBody, answer=Tokenized
    ),
    _Operation(
        method="post", path="/detokenize", summary="Spell tokens", body=DetokenizeBody, answer=Detokenized
    ),
    _Operation(method="get", path="/health", summary="200 when a replica can serve", answer=Status),
    _Operation(method="get", path="/ready", summary="200 when a replica can serve", answer=Status),
    _Operation(method="get", path="/version", summary="Version of the server", answer=Version),
)


@cache
def document() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    types = [kind for operation in _OPERATIONS for kind in (operation.body, operation.answer) if kind]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip([*types, ErrorBody], schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Headway",
                "version": "1",
                "description": "The OpenAI API. docs/api.md has ranges, defaults and rules.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


@cache
def page() -> bytes:
    """Return the document as a page that needs nothing from elsewhere."""
    described = json.loads(document())
    parts = ["<!doctype html><meta charset=utf-8><title>Headway API</title><style>"]
    parts.append("body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}")
    parts.append("pre{overflow:auto;background:#8881;padding:1rem}</style><h1>Headway API</h1>")
    parts.append(f"<p>{html.escape(described['info']['description'])} ")
    parts.append('<a href="openapi.json">openapi.json</a></p>')
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}"
            )
    for name, schema in described["components"]["schemas"].items():
        text = html.escape(json.dumps(schema, indent=2))
        parts.append(f"<details><summary>{html.escape(name)}</summary><pre>{text}</pre></details>")
    return "".join(parts).encode()


def _described(operation: _Operation, schemas: dict[type, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schemas[operation.answer]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refusal = {
        "description": "Refused",
        "content": {"application/json": {"schema": schemas[ErrorBody]}},
    }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{str(status): refusal for status in _REFUSALS},
        },
    }
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.body]}},
        }
    return described
