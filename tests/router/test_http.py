"""Bodies, headers and request ids."""

from typing import Any

import pytest

from router.app import App
from router.http import MAX_BODY_BYTES
from tests.router.asgi_client import CHAT, HI, TEXT, begin, call
from tests.router.fake_backend import FakeBackend
from tests.router.tiny_tokenizers import app_token


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_a_wrong_content_type_is_refused(app: App, path: str, kind: str) -> None:
    refused = await call(app, path, HI, headers={"content-type": kind})
    assert (refused.status, refused.error["code"]) == (400, "invalid_content_type")


async def test_a_charset_is_allowed(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await call(app, CHAT, HI, headers=headers)).status == 200


async def test_a_compressed_body_is_refused(app: App) -> None:
    assert (await call(app, CHAT, HI, headers={"content-encoding": "gzip"})).status == 400


async def test_an_honest_body_that_is_too_large_is_refused_unread(app: App) -> None:
    headers = {"content-length": str(MAX_BODY_BYTES + 1)}
    refused = await call(app, CHAT, HI, headers=headers)
    assert (refused.status, refused.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("headers", [{}, {"content-length": "5"}, {"content-length": "x"}])
async def test_a_body_that_hides_its_size_is_refused(app: App, headers: dict[str, str]) -> None:
    refused = await call(app, CHAT, b" " * (MAX_BODY_BYTES + 1), headers=headers)
    assert refused.status == 413


@pytest.mark.parametrize("header", ["X-Request-Disconnect-Disabled", "x-request-timeout-seconds"])
@pytest.mark.parametrize("path", [CHAT, "/health"])
async def test_headers_that_steer_serve_are_refused(app: App, header: str, path: str) -> None:
    refused = await call(app, path, HI, headers={header: "1"})
    assert (refused.status, refused.error["code"]) == (400, "invalid_header")


async def test_a_sane_request_id_is_echoed_and_passed_on(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    done = await call(app, CHAT, HI, headers={"x-request-id": "my-id.1:2_3"})
    assert done.response_headers["x-request-id"] == "my-id.1:2_3"
    assert backend.generations[0].trace_id == "my-id.1:2_3"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\n", "<script>"])
async def test_other_request_ids_are_replaced(app: App, given: str) -> None:
    done = await call(app, "/health", method="GET", headers={"x-request-id": given})
    assert len(done.response_headers["x-request-id"]) == 32


async def test_two_live_requests_with_one_id_are_independent(app: App, backend: FakeBackend) -> None:
    headers = {"x-request-id": "same"}
    first = begin(app, CHAT, HI, headers=headers)
    one = await backend.started()
    second = begin(app, CHAT, HI, headers=headers)
    two = await backend.started()
    first.hang_up()
    await first.finish()
    assert one.aborted.is_set()
    assert not two.aborted.is_set()
    two.push([app_token(ord("b"))])
    two.stop()
    assert (await second.finish()).json["choices"][0]["message"]["content"] == "b"


async def test_an_id_may_be_used_again_right_after_a_hang_up(app: App, backend: FakeBackend) -> None:
    headers = {"x-request-id": "same"}
    first = begin(app, CHAT, HI, headers=headers)
    one = await backend.started()
    first.hang_up()
    second = begin(app, CHAT, HI, headers=headers)
    two = await backend.started()
    await first.finish()
    assert one.aborted.is_set()
    two.stop()
    done = await second.finish()
    assert (done.status, done.response_headers["x-request-id"]) == (200, "same")
    assert not two.aborted.is_set()
