"""The live page in a real browser, over a server without a model."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page

from cluster.bench.http_drive import drive_http
from replicas.api import GenerateRequest, SamplingParams
from tests.e2e.browser import open_browser, open_page
from tests.e2e.server import Server, start_null, wait_for

pytestmark = pytest.mark.e2e

SEATS = 32
VIEWS = ("line", "board", "playground", "load")
CARD = "document.querySelector('.replica')"

RIDERS = [[seat, seat + 1, 0, 4, 0, 0, 9, 0, 1, "r"] for seat in range(2)]
"""As replicas/step_record.py puts them on the wire."""


def step(
    number: int, started: list[object], chunks: list[object], finished: list[object] | None = None
) -> list[object]:
    """A record in which nobody had lost a seat before."""
    return [number, number / 10, 5.0, 0, 1, False, [], started, chunks, [], finished or []]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Steps of 64 tokens: prompts beside full seats come in chunks."""
    server = start_null(
        tmp_path_factory.mktemp("page"),
        f"engine: {{max_num_seqs: {SEATS}, max_num_batched_tokens: 64, num_threads: 1}}\n",
    )
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


def until(page: Page, condition: str) -> None:
    """Wait until a JavaScript expression is true. The page's policy forbids Playwright's own way."""
    wait_for(lambda: page.evaluate(condition) or None, condition)


@contextmanager
def full_seats(line: Server, page: Page) -> Iterator[None]:
    """All seats taken by outputs of the last tier, as the page sees it."""
    body = {"model": "null", "prompt": "once", "n": SEATS, "max_tokens": 8000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{line.url}/v1/completions", json=body | {"priority": 2, "stream": True}, timeout=60
    ):
        until(page, f"{CARD}?.querySelector('[data-is=batch]').textContent.startsWith('{SEATS} ')")
        yield


def test_the_page_loads_whole_from_its_own_server(line: Server, browser: Browser) -> None:
    with open_page(browser, line.url) as page:
        answer = page.request.get(f"{line.url}/ui/")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        urls = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert len(urls) > 10
        assert all(url.startswith(line.url) for url in urls)
        loaded_ms = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        print(f"loaded in {loaded_ms:.0f} ms")


@pytest.mark.parametrize("width", [1280, 390])
def test_no_view_is_wider_than_the_screen(line: Server, browser: Browser, width: int) -> None:
    with open_page(browser, line.url, width=width) as page:
        for view in VIEWS:
            page.click(f"nav a[href='#{view}']")
            page.wait_for_selector(f"section#{view}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("main > section:visible").count() == 1


def test_the_page_follows_the_colour_scheme(line: Server, browser: Browser) -> None:
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    with open_page(browser, line.url) as page:
        light = page.evaluate(paper)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(paper) != light


def test_a_chat_streams_and_says_what_it_took(line: Server, browser: Browser) -> None:
    with open_page(browser, line.url) as page:
        page.click("nav a[href='#playground']")
        page.select_option("#tier", label="standard")
        page.fill("#max-tokens", "50")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Control+Enter")
        figures = page.locator("#log .assistant .figures")
        page.wait_for_selector("#log .assistant .figures:has-text('+ 50 tokens')")
        assert "TTFT" in figures.inner_text()
        assert "ITL" in figures.inner_text()
        # One text node per event.
        pieces = "document.querySelector('#log .assistant .text').childNodes.length"
        assert page.evaluate(pieces) > 10


def test_the_request_is_copied_as_code(line: Server, browser: Browser) -> None:
    with open_page(browser, line.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("nav a[href='#playground']")
        page.fill("#prompt", "it's me")
        for button, expected in (("#copy-curl", r"it'\''s me"), ("#copy-python", '"it\'s me"')):
            page.click(button)
            until(page, "document.querySelector('#copied').textContent === 'Copied.'")
            code = page.evaluate("navigator.clipboard.readText()")
            assert expected in code
            assert line.url in code


def test_the_line_shows_a_preemption_and_a_prompt_in_chunks(line: Server, browser: Browser) -> None:
    with open_page(browser, line.url) as page, full_seats(line, page):
        body = {"model": "null", "prompt": [7] * 400, "max_tokens": 5}
        assert httpx.post(f"{line.url}/v1/completions", json=body, timeout=60).status_code == 200
        counts = f"{CARD}.querySelector('[data-is=live-idle]').textContent"
        until(page, f"/[1-9]\\d* prompts? in chunks, [1-9]\\d* preemption/.test({counts})")


def test_a_preemption_is_drawn_as_a_red_cross(line: Server, browser: Browser) -> None:
    """Drawn from records made up here: live ones have left the picture in a second."""
    records = [
        step(0, RIDERS, [[0, 4, 4], [1, 4, 0]]),
        step(1, [], [[0, 4, 0]]),
        [2, 0.3, 5.0, 1, 1, False, [[1, "preempted", 1]], [], [], [], []],
    ]
    with open_page(browser, line.url) as page:
        reds = page.evaluate(
            """async (records) => {
                const { Train } = await import("./train.js");
                const { drawSeats } = await import("./seat_map.js");
                const train = new Train();
                train.take([3, records, []]);
                const canvas = document.createElement("canvas");
                canvas.className = "seats";
                document.querySelector("#line").append(canvas);
                drawSeats(canvas, train.rides, { numSeats: 2, end: train.end, rankOf: () => 0 });
                const { width, height } = canvas;
                const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
                const reds = { first: 0, second: 0 };
                for (let i = 0; i < data.length; i += 4)
                    if (data[i] === 192 && data[i + 1] === 42 && data[i + 2] === 29)
                        reds[Math.floor(i / 4 / width) < height / 2 ? "first" : "second"] += 1;
                return reds;
            }""",
            records,
        )
    assert reds["first"] == 0
    assert reds["second"] > 5


def test_seats_are_read_and_the_picture_is_held_from_the_keyboard(line: Server, browser: Browser) -> None:
    with open_page(browser, line.url) as page, full_seats(line, page):
        page.click(".replica summary")
        until(page, f"{CARD}.querySelectorAll('tbody tr').length === {SEATS}")
        page.keyboard.press("p")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        page.focus(".replica [data-is=seats]")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#tip:visible")
        page.keyboard.press("ArrowDown")
        text = page.inner_text("#tip")
        assert "Seat 2, batch" in text
        assert "answer" in text
        assert "32 of 32 seats taken" in (page.get_attribute(".replica [data-is=seats]", "aria-label") or "")
        page.reload()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"


def test_a_demo_load_moves_the_line_and_the_board(line: Server, browser: Browser) -> None:
    with open_page(browser, line.url) as page:
        page.click("nav a[href='#load']")
        for field, value in (
            ("rate", "40"),
            ("seconds", "2"),
            ("prompt-tokens", "20"),
            ("output-tokens", "20"),
        ):
            page.fill(f"#{field}", value)
        page.click("#load-start")
        page.click("nav a[href='#board']")
        page.wait_for_selector("#tier-rows td:nth-child(3):has-text('s')")
        page.wait_for_selector("#states:has-text('1 running')")
        page.click("nav a[href='#load']")
        until(page, "document.querySelector('#load-note').textContent === 'Ended.'")
        assert int(page.inner_text("#load-state > div:nth-child(3) dd")) > 10
        page.click("nav a[href='#line']")
        page.wait_for_selector(".replica [data-is=seats]")


def test_the_page_keeps_up_with_32_streams_at_full_speed(line: Server, browser: Browser) -> None:
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=number, prompt_ids=(7,) * 20, sampling=sampling) for number in range(SEATS)
    ]
    with open_page(browser, line.url) as page:
        streams = threading.Thread(target=drive_http, args=(line.url, "null", requests, SEATS))
        streams.start()
        until(
            page,
            f"""() => {{
                const data = {CARD}?.dataset;
                return data && data.columns > 300 && data.lagMs < 5000 && data.pending < 200;
            }}""",
        )
        print(page.evaluate(f"`behind by ${{{CARD}.dataset.lagMs}} ms`"))
        streams.join()
        until(page, f"{CARD}.dataset.pending === '0'")


def test_the_static_picture_binds_a_batch_until_its_longest_answer_ends(
    line: Server, browser: Browser
) -> None:
    """Two seats; requests of 1, 3 and 2 steps: a seat idles twice, and the third request is behind."""

    records = [
        step(0, RIDERS, [[0, 4, 0], [1, 4, 0]], [[0, "length", 1]]),
        step(1, [[0, 3, *RIDERS[0][2:]]], [[0, 4, 0]]),
        step(2, [], [], [[0, "length", 2], [1, "length", 3]]),
    ]
    with open_page(browser, line.url) as page:
        found = page.evaluate(
            """async (records) => {
                const { Train } = await import("./train.js");
                const { StaticTrain } = await import("./static_train.js");
                const train = new Train();
                const still = new StaticTrain(train, 2, 100);
                train.take([3, records, []]);
                return [train.idleShare(2), still.idleShare(), still.finished, still.numBehind];
            }""",
            records,
        )
    assert found == [0, pytest.approx(1 / 3), 2, 1]


def test_a_picture_goes_on_after_the_stream_was_opened_again(line: Server, browser: Browser) -> None:
    """Of two riders one still sits there, the other has ended meanwhile."""
    first, second = step(1, RIDERS, [[0, 4, 0], [1, 4, 0]]), step(9, [], [])
    with open_page(browser, line.url) as page:
        found = page.evaluate(
            """async ([first, second, riders]) => {
                const { Train } = await import("./train.js");
                const train = new Train();
                train.take([1, [first], []]);
                train.take([9, [], riders]);
                train.take([10, [second], null]);
                return train.rides.map((ride) => [ride.seat, ride.from, ride.to, ride.rider.endedAt]);
            }""",
            [first, second, [RIDERS[0]]],
        )
    assert found == [[0, 0, None, None], [1, 0, 1, 0.1]]
