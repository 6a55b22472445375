"""The OpenAPI document is true: what is generated from it gets the answers that it describes."""

import asyncio
import json
import re
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import openapi
from router.app import App, build_app
from router.text import TextCodec
from tests.router.asgi_client import call, get
from tests.router.fake_backend import FakeBackend
from tests.router.test_fuzz import answer_at_once

DOCUMENT = json.loads(openapi.document())
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def app(byte_level: TextCodec) -> App:
    return build_app(FakeBackend(answer_at_once), byte_level)


async def test_it_is_served_with_a_page_that_needs_nothing_from_elsewhere(app: App) -> None:
    assert (await get(app, "/openapi.json")).json == DOCUMENT
    shown = await get(app, "/docs")
    assert shown.response_headers["content-type"].startswith("text/html")
    assert not re.search(rb'(src|href)="?(https?:)?//', shown.raw)
    for path, _ in OPERATIONS:
        assert path.encode() in shown.raw


def described(path: str, method: str, status: int, kind: str) -> dict[str, Any]:
    """The schema of an answer, with what it refers to."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    schema: dict[str, Any] = responses[str(status)]["content"][kind]["schema"]
    return schema | {"components": DOCUMENT["components"]}


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_answer_is_described(app: App, path: str, method: str, data: st.DataObject) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    case = data.draw(operation.as_strategy())
    url = case.formatted_path
    body = case.body if isinstance(case.body, dict | list | str | int | float | None) else None
    done = asyncio.run(call(app, url, body, method=method.upper()))
    assert done.status is not None
    kind = done.response_headers["content-type"].partition(";")[0]
    schema = described(path, method, done.status, kind)
    assert done.status < 500
    if kind == "application/json":
        jsonschema_rs.validate(schema, done.json)
