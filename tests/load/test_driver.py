import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from load.completion import Dialect
from load.connection import Target
from load.echo import Pace, serve_echo
from load.lengths import parse_lengths
from load.plan import Script, Tenant
from load.record import Progress, Report, RequestRecord, WorkerEnd
from load.words import WORDS
from load.worker import Assignment, Driver, Users
from load.workload import Workload
from tests.load.raw_server import Writer, accepting, head, read_request, sending, serving, sized

WORKLOAD = Workload(input_tokens=parse_lengths("8"), output_tokens=parse_lengths("3"))
STREAM = (
    b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":" two"},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)
OK = head() + STREAM
REFUSED = sized(b"{}", "application/json", "429 Too Many Requests", "Retry-After: 0.001\r\n")


class Reports:
    """Keeps what a driver reports."""

    def __init__(self) -> None:
        self.all: list[Report] = []

    def send(self, report: Report) -> None:
        self.all.append(report)

    @property
    def records(self) -> list[RequestRecord]:
        return [record for report in self.all if isinstance(report, Progress) for record in report.records]


def assignment(target: Target, *scripts: Script, **fields: Any) -> Assignment:
    defaults: dict[str, Any] = {
        "worker": 0,
        "target": target,
        "dialect": Dialect(model="m"),
        "tenants": (Tenant(), Tenant(name="b", api_key="key-of-b", body={"priority": 2})),
        "workload": WORKLOAD,
        "scripts": scripts,
        "words": WORDS,
        "request_timeout_s": 10.0,
    }
    return Assignment(**defaults | fields)


async def drive(task: Assignment) -> Reports:
    reports = Reports()
    await Driver(task, reports).run(time.perf_counter())
    return reports


@asynccontextmanager
async def echoing(pace: Pace) -> AsyncIterator[Target]:
    server = await serve_echo(pace, "127.0.0.1", 0)
    async with server:
        yield Target(host="127.0.0.1", port=server.sockets[0].getsockname()[1])


async def test_every_script_leaves_a_record() -> None:
    scripts = [WORKLOAD.script(i, 0, i * 0.002) for i in range(10)]
    async with echoing(Pace(ttft_ms=1, itl_ms=1)) as target:
        reports = await drive(assignment(target, *scripts))
    assert sorted(record.script for record in reports.records) == list(range(10))
    for record in reports.records:
        assert record.failure is None
        assert len(record.output_at) == record.output_tokens == 3
        assert record.due_s <= record.first_sent_s == record.sent_s <= record.output_at[0] <= record.done_s
    assert isinstance(reports.all[-1], WorkerEnd)
    assert reports.all[-1].cpu_s > 0


async def test_users_wait_for_their_answers() -> None:
    users = Users(numbers=(0, 1, 2), tenants=(0, 0, 1), indexes=(0, 12, 1), duration_s=1e9)
    async with echoing(Pace(ttft_ms=2, itl_ms=1)) as target:
        records = (await drive(assignment(target, users=users))).records
    assert sorted(record.script for record in records) == list(range(12))
    assert {record.tenant for record in records} == {0, 1}
    edges = [(record.first_sent_s, 1) for record in records] + [(record.done_s, -1) for record in records]
    in_flight = most = 0
    for _, change in sorted(edges):
        in_flight += change
        most = max(most, in_flight)
    assert most == 3


async def test_users_pause_after_a_failure() -> None:
    users = Users(numbers=(0, 1), tenants=(0, 0), indexes=(0, 1 << 40, 1), duration_s=0.4)
    records = (await drive(assignment(Target(host="127.0.0.1", port=1), users=users))).records
    # Nobody listens there: without a pause there would be hundreds.
    assert len(records) <= 2
    assert all(record.failure == "connect" for record in records)


async def test_users_ask_nothing_once_the_time_is_over() -> None:
    users = Users(numbers=(0, 1), tenants=(0, 0), indexes=(0, 1 << 40, 1), duration_s=0.0)
    reports = await drive(assignment(Target(host="127.0.0.1", port=1), users=users))
    assert reports.records == []


def recording(bodies: list[dict[str, Any]], heads: list[bytes] | None = None) -> Any:
    async def on_connection(reader: asyncio.StreamReader, writer: Writer) -> None:
        top, _, body = (await read_request(reader)).partition(b"\r\n\r\n")
        bodies.append(json.loads(body))
        if heads is not None:
            heads.append(top)
        writer.write(OK)
        await writer.drain()

    return accepting(on_connection)


async def test_each_turn_of_a_session_carries_the_conversation() -> None:
    workload = Workload(
        input_tokens=parse_lengths("8"),
        output_tokens=parse_lengths("3"),
        turns=parse_lengths("3"),
        prefix_tokens=5,
    )
    bodies: list[dict[str, Any]] = []
    async with recording(bodies) as target:
        records = (await drive(assignment(target, workload.script(0, 0, 0.0)))).records
    assert [record.turn for record in records] == [0, 1, 2]
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles[0] == ["system", "user"]
    assert roles[2] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert bodies[1]["messages"][:2] == bodies[0]["messages"]
    assert bodies[1]["messages"][2]["content"] == "one two"


async def test_a_session_ends_with_its_first_failure() -> None:
    workload = Workload(
        input_tokens=parse_lengths("8"), output_tokens=parse_lengths("3"), turns=parse_lengths("3")
    )
    async with serving(sending(OK), sending(head())) as target:
        records = (await drive(assignment(target, workload.script(0, 0, 0.0)))).records
    assert [record.failure for record in records] == [None, "truncated"]


async def test_a_tenant_sends_its_key_and_its_fields() -> None:
    bodies: list[dict[str, Any]] = []
    heads: list[bytes] = []
    async with recording(bodies, heads) as target:
        await drive(assignment(target, WORKLOAD.script(0, 1, 0.0)))
    assert b"\r\nAuthorization: Bearer key-of-b" in heads[0]
    assert bodies[0]["priority"] == 2
    assert bodies[0]["max_tokens"] == 3
    assert bodies[0]["stream_options"] == {"include_usage": True}


async def test_retry_after_is_obeyed_as_often_as_allowed() -> None:
    async with serving(sending(REFUSED), sending(REFUSED), sending(OK)) as target:
        (record,) = (await drive(assignment(target, WORKLOAD.script(0, 0, 0.0), max_retries=2))).records
    assert (record.failure, record.attempts, record.status) == (None, 3, 200)
    assert record.sent_s - record.first_sent_s >= 0.002


@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_refusal_counts_when_the_retries_are_used_up(max_retries: int) -> None:
    async def run() -> RequestRecord:
        async with serving(sending(REFUSED)) as target:
            script = WORKLOAD.script(0, 0, 0.0)
            (record,) = (await drive(assignment(target, script, max_retries=max_retries))).records
        return record

    record = asyncio.run(run())
    assert (record.failure, record.status, record.attempts) == ("http_status", 429, max_retries + 1)


async def test_a_refusal_without_retry_after_is_not_tried_again() -> None:
    refused = sized(b"{}", "application/json", "503 Service Unavailable")
    async with serving(sending(refused)) as target:
        (record,) = (await drive(assignment(target, WORKLOAD.script(0, 0, 0.0), max_retries=5))).records
    assert (record.status, record.attempts) == (503, 1)


async def test_a_retry_after_beyond_the_timeout_is_not_waited_for() -> None:
    refused = sized(b"{}", "application/json", "429 Too Many Requests", "Retry-After: 86400\r\n")
    async with serving(sending(refused)) as target:
        (record,) = (await drive(assignment(target, WORKLOAD.script(0, 0, 0.0), max_retries=5))).records
    assert (record.status, record.attempts) == (429, 1)


async def test_cancelled_requests_hang_up_where_planned() -> None:
    workload = Workload(
        input_tokens=parse_lengths("8"), output_tokens=parse_lengths("500"), cancel_fraction=1.0
    )
    script = workload.script(0, 0, 0.0)
    async with echoing(Pace(ttft_ms=1, itl_ms=1)) as target:
        (record,) = (await drive(assignment(target, script))).records
    assert record.is_cancelled
    assert record.failure is None
    assert script.turns[0].stop_after <= len(record.output_at) < 500


async def test_a_slow_reader_takes_its_time() -> None:
    slow = Workload(
        input_tokens=parse_lengths("8"),
        output_tokens=parse_lengths("500"),
        slow_fraction=1.0,
        slow_bytes_per_s=400_000.0,
    )
    async with echoing(Pace(ttft_ms=0, itl_ms=0)) as target:
        (record,) = (await drive(assignment(target, slow.script(0, 0, 0.0)))).records
    assert record.is_slow
    assert record.failure is None
    # The answer is some 80 KB; after each read but the last the reader rests.
    assert record.done_s - record.sent_s > 40_000 / 400_000


async def test_stopping_records_what_was_in_flight_and_forgets_the_rest() -> None:
    reports = Reports()
    scripts = [WORKLOAD.script(0, 0, 0.0), WORKLOAD.script(1, 0, 1e6)]
    begun = asyncio.Event()

    async def begin(writer: Writer) -> None:
        writer.write(head())
        await writer.drain()
        begun.set()
        await released.wait()

    released = asyncio.Event()
    async with serving(begin) as target:
        driver = Driver(assignment(target, *scripts), reports)
        running = asyncio.create_task(driver.run(time.perf_counter()))
        await begun.wait()
        driver.stop()
        driver.stop()
        await running
        released.set()
    (record,) = reports.records
    assert record.failure == "stopped"


async def test_an_error_of_our_own_is_not_swallowed() -> None:
    broken = Script(0, 7, WORKLOAD.script(0, 0, 0.0).turns)
    with pytest.raises(IndexError):
        await drive(assignment(Target(host="127.0.0.1", port=1), broken))
