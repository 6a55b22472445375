"""Routes."""

from typing import Any

from router.app import App
from tests.router.asgi_client import CHAT, call, get
from tests.router.fake_backend import FakeBackend


async def test_health_follows_the_replicas(app: App, backend: FakeBackend) -> None:
    assert (await get(app, "/health")).status == 200
    backend.card = None
    assert (await get(app, "/health")).status == 503


async def test_models_are_listed_and_shown(app: App) -> None:
    [entry] = (await get(app, "/v1/models")).json["data"]
    assert entry["id"] == "tiny"
    assert (await get(app, "/v1/models/tiny")).json == entry
    assert (await get(app, "/v1/models/other%2Fmodel")).status == 404


async def test_the_version_is_a_string(app: App) -> None:
    assert isinstance((await get(app, "/version")).json["version"], str)


async def test_unknown_urls_and_methods_are_openai_errors(app: App) -> None:
    assert (await get(app, "/v1/nothing")).error["code"] == "unknown_url"
    refused = await get(app, CHAT)
    assert (refused.status, refused.response_headers["allow"]) == (405, "POST")
    assert refused.error["code"] == "method_not_allowed"


async def test_head_has_headers_and_no_body(app: App) -> None:
    done = await call(app, "/health", method="HEAD")
    assert (done.status, done.raw) == (200, b"")
    assert done.response_headers["content-length"] != "0"


async def test_the_lifespan_is_answered(app: App) -> None:
    incoming = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        return next(incoming)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
