"""The live page's routes: who may see what, and what comes over the event stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from replicas.step_record import Rider, StepNews, StepRecord, StepWatch
from router.app import App, build_app
from router.callers import Caller
from router.limits import NoLimits
from router.measures import RouterMeasures
from router.step_feed import MAX_PAGES
from router.tenants import DEFAULT_TIERS, Tenant
from router.text import TextCodec
from router.transport import ReplicaGoneError
from router.ui import Ui
from router.ui_files import FOLDER, PATHS
from tests.router.asgi_client import Call, begin, call, get
from tests.router.fake_transport import serving

RIDER = Rider(0, 1, 0, 8, 0, 0, 16, 0, 3, "r-1")
OTHERS = Caller(tenant=Tenant(name="acme", tier="standard"), tier=1)


@dataclass
class Steps:
    """A StepSource that says what the test wants, and remembers the cursors."""

    reports: list[StepNews] = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)
    is_gone: bool = False

    async def steps(self, replica: str, watch: bytes) -> bytes:
        assert replica == "one"
        self.cursors.append(msgspec.msgpack.decode(watch, type=StepWatch).after)
        if self.is_gone:
            raise ReplicaGoneError(replica)
        report = self.reports.pop(0) if self.reports else StepNews(cursor=self.cursors[-1])
        return msgspec.msgpack.encode(report)


@dataclass
class Page:
    app: App
    steps: Steps
    closed_app: App
    """For a caller who is no admin."""


@pytest.fixture
async def page(byte_level: TextCodec) -> AsyncIterator[Page]:
    steps = Steps()
    measures = RouterMeasures()
    measures.tiers["standard"].ttft_ms.observe(100.0)
    async with serving("one") as (backend, _):
        ui = Ui("r", backend, steps, NoLimits(), measures, DEFAULT_TIERS)
        yield Page(
            app=build_app(backend, byte_level, ui=ui),
            steps=steps,
            closed_app=build_app(backend, byte_level, ui=ui, identify=lambda _: OTHERS),
        )


async def next_event(stream: Call, kind: str) -> dict[str, Any]:
    """The next event of a kind."""
    while True:
        chunk = await asyncio.wait_for(stream.next_chunk(), 10)
        assert chunk is not None
        for part in chunk.decode().split("\n\n")[:-1]:
            event: dict[str, Any] = json.loads(part.removeprefix("data: "))
            if event["kind"] == kind:
                return event


async def leave(stream: Call) -> None:
    stream.hang_up()
    await asyncio.wait_for(stream.finish(), 10)


async def test_the_page_is_open_and_may_load_nothing_from_elsewhere(page: Page) -> None:
    answer = await get(page.closed_app, "/ui/")
    assert (answer.status, answer.response_headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.response_headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


async def test_the_short_address_leads_to_the_page(page: Page) -> None:
    answer = await get(page.app, "/ui")
    assert (answer.status, answer.response_headers["location"]) == (307, "ui/")


@pytest.mark.parametrize("path", sorted(PATHS - {"/ui"}))
async def test_every_file_is_served_and_names_no_other_host(page: Page, path: str) -> None:
    answer = await get(page.app, path)
    assert answer.status == 200
    assert b"http://" not in answer.raw.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in answer.raw


async def test_nothing_but_its_files_is_served(page: Page) -> None:
    for path in ("/ui/nothing.js", "/ui/../ui.py", "/ui/%2e%2e/ui.py", "/ui/.hidden"):
        assert (await get(page.app, path)).status == 404


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 100_000


async def test_data_and_load_are_for_admins(page: Page) -> None:
    for refused in (await get(page.closed_app, "/ui/events"), await call(page.closed_app, "/ui/load", {})):
        assert (refused.status, refused.error["code"]) == (403, "admin_required")


async def test_the_board_says_what_there_is_and_what_was_promised(page: Page) -> None:
    stream = begin(page.app, "/ui/events", method="GET")
    board = await next_event(stream, "board")
    assert [(row["name"], row["state"]) for row in board["replicas"]] == [("one", "running")]
    assert [(tier["name"], tier["ttft_target_ms"], tier["itl_target_ms"]) for tier in board["tiers"]] == [
        ("interactive", 2000.0, None),
        ("standard", 10000.0, None),
        ("batch", None, None),
    ]
    (bucket,) = (number for number, count in enumerate(board["tiers"][1]["ttft_counts"]) if count)
    assert board["ttft_edges_ms"][bucket] == 100.0
    await leave(stream)


async def test_steps_come_as_they_pass_and_are_asked_for_from_where_they_ended(page: Page) -> None:
    record = StepRecord(0, 1.5, 20.0, 0, 3, False, started=(RIDER,))
    page.steps.reports = [StepNews(4, riders=()), StepNews(5, (record,))]
    stream = begin(page.app, "/ui/events", method="GET")
    assert (await next_event(stream, "steps"))["replicas"] == {"one": [4, [], []]}
    event = await next_event(stream, "steps")
    assert event["replicas"]["one"][0] == 5
    number, at, step_ms, *_ = event["replicas"]["one"][1][0]
    assert (number, at, step_ms) == (0, 1.5, 20.0)
    await leave(stream)
    assert page.steps.cursors[:2] == [0, 4]


async def test_a_replica_that_does_not_answer_holds_up_nothing(page: Page) -> None:
    page.steps.is_gone = True
    stream = begin(page.app, "/ui/events", method="GET")
    await next_event(stream, "board")
    await next_event(stream, "board")
    await leave(stream)


async def test_pages_are_bounded_and_one_that_leaves_makes_room(page: Page) -> None:
    streams = [begin(page.app, "/ui/events", method="GET") for _ in range(MAX_PAGES)]
    for stream in streams:
        await next_event(stream, "board")
    refused = await get(page.app, "/ui/events")
    assert (refused.status, refused.error["code"]) == (429, "too_many_pages")
    await leave(streams.pop())
    streams.append(begin(page.app, "/ui/events", method="GET"))
    await next_event(streams[-1], "board")
    for stream in streams:
        await leave(stream)


async def test_a_demo_load_tells_what_became_of_its_requests(page: Page) -> None:
    body = {"requests_per_s": 50, "duration_s": 0.4, "prompt_tokens": 4, "output_tokens": 3}
    load = await asyncio.wait_for(call(page.app, "/ui/load", body), 30)
    assert load.status == 200
    last = json.loads(load.raw.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["ended"]
    assert last["num_running"] == 0
    assert last["num_sent"] == last["num_finished"] + last["num_refused"] + last["num_failed"]


async def test_one_demo_load_at_a_time_and_hanging_up_ends_it(page: Page) -> None:
    body = {"requests_per_s": 50, "duration_s": 100, "prompt_tokens": 4, "output_tokens": 3}
    load = begin(page.app, "/ui/load", body)
    await next_event(load, "load")
    refused = await call(page.app, "/ui/load", body)
    assert (refused.status, refused.error["code"]) == (409, "load_running")
    await leave(load)
    again = begin(page.app, "/ui/load", body)
    await next_event(again, "load")
    await leave(again)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"requests_per_s": 1000}, "requests_per_s"),
        ({"duration_s": 1e9}, "duration_s"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"output_tokens": 10**9}, "output_tokens"),
        ({"priority": 77}, "priority"),
        ({"rate": 1}, "rate"),
    ],
)
async def test_a_load_beyond_its_bounds_is_refused(page: Page, change: dict[str, Any], param: str) -> None:
    refused = await call(page.app, "/ui/load", change)
    assert (refused.status, refused.error["param"]) == (400, param)
