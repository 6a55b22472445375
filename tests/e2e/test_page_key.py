"""The live page of a server with keys, in a real browser; the server is the router's application alone."""

import asyncio
import threading
from collections.abc import Iterator

import msgspec
import pytest
import uvicorn
from playwright.sync_api import Page

from replicas.step_record import StepNews
from router.app import build_app
from router.callers import KeyedCallers
from router.keys import format_key, hash_key
from router.limits import NoLimits
from router.measures import RouterMeasures
from router.tenants import DEFAULT_TIERS, Catalogue, KeyRecord, Tenant
from router.text import TextCodec
from router.ui import Ui
from tests.e2e.browser import open_browser
from tests.e2e.server import wait_for
from tests.router.fake_transport import serving
from tests.router.tiny_tokenizers import byte_level_folder

pytestmark = pytest.mark.e2e

PEPPER = b"a pepper for tests only"
TENANTS = (
    Tenant(name="boss", tier="interactive", admin=True),
    Tenant(name="guest", tier="standard"),
)
KEYS = {tenant.name: format_key(str(n) * 12, "s" * 43) for n, tenant in enumerate(TENANTS)}


class NoSteps:
    async def steps(self, replica: str, watch: bytes) -> bytes:  # noqa: ARG002 - a StepSource
        return msgspec.msgpack.encode(StepNews(cursor=1))


async def _serve(text: TextCodec, opened: list[uvicorn.Server]) -> None:
    callers = KeyedCallers(DEFAULT_TIERS, PEPPER, lambda: 0.0)
    records = (
        KeyRecord(id=str(n) * 12, tenant=name, hash=hash_key(key, PEPPER), created_at="2026-01-01")
        for n, (name, key) in enumerate(KEYS.items())
    )
    callers.replace(Catalogue(version="1", tenants=TENANTS, keys=tuple(records)))
    async with serving("one") as (backend, _):
        ui = Ui("r", backend, NoSteps(), NoLimits(), RouterMeasures(), DEFAULT_TIERS)
        app = build_app(backend, text, identify=callers, ui=ui)
        config = uvicorn.Config(app, port=0, log_level="error", ws="none", timeout_graceful_shutdown=1)
        opened.append(uvicorn.Server(config))
        await opened[0].serve()


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    text = TextCodec.from_folder(byte_level_folder(tmp_path_factory.mktemp("text")))
    opened: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: asyncio.run(_serve(text, opened)))
    thread.start()
    wait_for(lambda: (opened and opened[0].started) or None, "the server")
    port = opened[0].servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    opened[0].should_exit = True
    thread.join()


def enter(page: Page, key: str) -> None:
    """As a person does: the button, the key, Enter."""
    page.click("#key-button")
    page.fill("#key", key)
    page.press("#key", "Enter")


def test_a_key_opens_what_it_may_open(url: str) -> None:
    with open_browser() as browser:
        page = browser.new_page()
        page.goto(f"{url}/ui/")
        page.wait_for_selector("#notice:has-text('a key is needed')")
        enter(page, KEYS["guest"])
        page.wait_for_selector("#notice:has-text('admin: true')")
        enter(page, KEYS["boss"])
        page.wait_for_selector("#link[data-state=live]")
        page.wait_for_selector("#notice", state="hidden")
        assert KEYS["boss"] not in page.content()
