"""A worker process: runs its part of the plan on one event loop, and reports.

Nothing else runs in it: the live view, the statistics and the writing of files belong to the parent, so that
they cannot delay a request or the reading of a token.
"""

import asyncio
import contextlib
import gc
import itertools
import queue
import random
import signal
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final, Protocol

import msgspec
import uvloop

from load.answer import Answer
from load.client import Client
from load.completion import Dialect, Message
from load.connection import Target
from load.plan import Script, Tenant, Turn
from load.record import Progress, Report, RequestRecord, WorkerCrash, WorkerEnd, new_record
from load.words import PromptWriter, WordSource
from load.workload import Workload

PROGRESS_S: Final = 0.25
LAG_PROBE_S: Final = 0.05
STOP_GRACE_S: Final = 0.2
FAILURE_PAUSE_S: Final = 0.5
"""A user whose request failed asks again after so long at the earliest: a server that is gone, or refuses,
would else be asked thousands of times a second."""
RETRY_STATUSES: Final = (429, 503)
STOP: Final = b"stop"


class Users(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop: users who each wait for their answer before they ask again."""

    numbers: tuple[int, ...]
    """The users of this worker."""
    tenants: tuple[int, ...]
    """The tenant of each."""
    indexes: tuple[int, int, int]
    """Script numbers of this worker: range(start, stop, step)."""
    duration_s: float
    """No script starts after this."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know."""

    worker: int
    target: Target
    dialect: Dialect
    tenants: tuple[Tenant, ...]
    workload: Workload
    scripts: tuple[Script, ...] = ()
    """An open loop, in order of `at_s`."""
    users: Users | None = None
    words: tuple[str, ...]
    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    request_timeout_s: float = 300.0
    max_retries: int = 0
    """How often a 429 or 503 with Retry-After is obeyed before it counts as the answer."""


def work(pipe: Pipe, assignment: bytes) -> None:
    """Run as a process: say `ready`, wait for the start instant, drive, report, end."""
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.msgpack.decode(assignment, type=Assignment)
    reports = _Reports(pipe)
    try:
        uvloop.run(_serve_parent(task, pipe, reports))
    except Exception:
        reports.send(WorkerCrash(worker=task.worker, traceback=traceback.format_exc()))
    reports.close()


class _Reports:
    """Sends reports from a thread: a parent that is slow to read must not hold up the event loop."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        self._queue.put(report)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while (report := self._queue.get()) is not None:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send_bytes(encoder.encode(report))


async def _serve_parent(task: Assignment, pipe: Pipe, reports: _Reports) -> None:
    driver = Driver(task, reports)
    pipe.send_bytes(b"ready")
    start_at = msgspec.msgpack.decode(pipe.recv_bytes(), type=float)
    loop = asyncio.get_running_loop()
    # Not a reader of the loop: that would make the pipe non-blocking, for the thread that writes to it too.
    threading.Thread(target=_hear_parent, args=(pipe, loop, driver), daemon=True).start()
    await driver.run(start_at)


def _hear_parent(pipe: Pipe, loop: asyncio.AbstractEventLoop, driver: "Driver") -> None:
    """Stop the driver when the parent says so, or is gone."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(driver.stop)


class ReportSink(Protocol):
    """Where a driver's reports go."""

    def send(self, report: Report) -> None:
        """Take a report; must not block."""
        ...


class Driver:
    """Runs one assignment on the current event loop."""

    def __init__(self, task: Assignment, reports: ReportSink) -> None:
        self._task = task
        self._reports = reports
        words = WordSource(task.words, tokens_per_word=task.tokens_per_word)
        self._writer = PromptWriter(words, overhead_tokens=task.overhead_tokens)
        self._client = Client(task.target, request_timeout_s=task.request_timeout_s)
        self._start_at = 0.0
        self._is_stopping = False
        self._over = asyncio.Event()
        """Nothing runs any more, or nothing shall."""
        self._error: BaseException | None = None
        self._main: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[object]] = set()
        self._records: list[RequestRecord] = []
        self._num_started = 0
        self._num_ended = 0
        self._num_output_events = 0

    async def run(self, start_at: float) -> None:
        """Drive from the instant `start_at` (time.perf_counter) on; returns when all is over."""
        self._start_at = start_at
        lags: list[float] = []
        # What exists now lives as long as the run: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        cpu_at_start = time.process_time()
        async with self._client:
            self._main = asyncio.create_task(self._drive())
            probes = [asyncio.create_task(self._probe_lag(lags)), asyncio.create_task(self._tell())]
            with contextlib.suppress(asyncio.CancelledError):
                await self._main
            await self._finish()
            for probe in probes:
                probe.cancel()
        if self._error is not None:
            raise self._error
        self._send_progress()
        cpu_s = time.process_time() - cpu_at_start
        self._reports.send(WorkerEnd(worker=self._task.worker, cpu_s=cpu_s, loop_lag_ms=lags))

    def stop(self) -> None:
        """End the run early: nothing new starts, what is in flight is given up and recorded. Idempotent."""
        self._is_stopping = True
        self._client.stop()
        if self._main is not None:
            self._main.cancel()
        self._over.set()

    async def _finish(self) -> None:
        if self._running and not self._is_stopping:
            self._over.clear()
            await self._over.wait()
        if self._running:
            # Those that had a request in flight end by themselves; the others are asleep.
            await asyncio.wait(self._running, timeout=STOP_GRACE_S)
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _drive(self) -> None:
        if self._task.users is not None:
            users = self._task.users
            indexes = iter(range(*users.indexes))
            for number, tenant in zip(users.numbers, users.tenants, strict=True):
                self._start(self._be_user(number, tenant, users.duration_s, indexes))
            return
        for script in self._task.scripts:
            # The prompt is written before it is due, in time that would be spent waiting.
            opening = self._open(script)
            due_at = self._start_at + script.at_s
            await _sleep_until(due_at)
            self._start(self._run_script(script, opening, due_at))

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not self._running:
            self._over.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self.stop()

    async def _be_user(self, number: int, tenant: int, duration_s: float, indexes: Iterator[int]) -> None:
        rng = random.Random(f"{self._task.workload.seed}/user/{number}")
        think_s = self._task.workload.think_s
        due_at = self._start_at
        for index in indexes:
            script = self._task.workload.script(index, tenant, 0.0)
            opening = self._open(script)
            await _sleep_until(due_at)
            if self._is_stopping or time.perf_counter() - self._start_at >= duration_s:
                return
            answer = await self._run_script(script, opening, due_at)
            pause_s = rng.expovariate(1 / think_s) if think_s else 0.0
            if answer.failure is not None:
                pause_s = max(pause_s, FAILURE_PAUSE_S)
            due_at = time.perf_counter() + pause_s

    def _open(self, script: Script) -> list[Message]:
        return self._writer.opening(script) + self._writer.turn(script.turns[0], is_first=True)

    async def _run_script(self, script: Script, messages: list[Message], due_at: float) -> Answer:
        """Send the turns in order until one does not come to its end; returns the last answer."""
        for number, turn in enumerate(script.turns):
            if number:
                messages += self._writer.turn(turn, is_first=False)
                due_at = time.perf_counter() + turn.think_s
                await _sleep_until(due_at)
            answer = await self._ask(script, number, messages, due_at)
            if answer.failure is not None or answer.is_cancelled or self._is_stopping:
                break
            messages.append({"role": "assistant", "content": "".join(answer.text)})
        return answer

    async def _ask(self, script: Script, number: int, messages: list[Message], due_at: float) -> Answer:
        """Send one turn, obeying Retry-After; leaves a record whatever happens."""
        tenant, turn = self._task.tenants[script.tenant], script.turns[number]
        body = self._task.dialect.body(messages, turn.output_tokens, tenant.body)
        self._num_started += 1
        first_sent_at: float | None = None
        for attempt in itertools.count(1):
            answer = await self._post(script, number, body, tenant, turn)
            first_sent_at = first_sent_at or answer.sent_at
            wait_s = answer.retry_after_s
            if answer.status not in RETRY_STATUSES or wait_s is None or self._is_stopping:
                break
            if attempt > self._task.max_retries or wait_s > self._task.request_timeout_s:
                break
            await asyncio.sleep(wait_s)
        self._num_ended += 1
        self._num_output_events += len(answer.output_at)
        self._records.append(
            new_record(
                script=script,
                turn_number=number,
                answer=answer,
                attempts=attempt,
                due_at=due_at,
                first_sent_at=first_sent_at or answer.sent_at,
                start_at=self._start_at,
            )
        )
        return answer

    async def _post(self, script: Script, number: int, body: bytes, tenant: Tenant, turn: Turn) -> Answer:
        return await self._client.post(
            self._task.dialect.path,
            body,
            api_key=tenant.api_key,
            keep_text=number + 1 < len(script.turns),
            stop_after=turn.stop_after,
            read_bytes_per_s=script.read_bytes_per_s,
        )

    async def _probe_lag(self, lags: list[float]) -> None:
        while True:
            due_at = time.perf_counter() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            lags.append(max(0.0, time.perf_counter() - due_at) * 1e3)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._send_progress()

    def _send_progress(self) -> None:
        records, self._records = self._records, []
        self._reports.send(
            Progress(
                worker=self._task.worker,
                started=self._num_started,
                in_flight=self._num_started - self._num_ended,
                output_events=self._num_output_events + self._client.num_output_events_in_flight,
                records=records,
            )
        )


async def _sleep_until(at: float) -> None:
    # uvloop's timers have whole milliseconds and may fire early by half of one.
    while (left_s := at - time.perf_counter()) > 0:  # noqa: ASYNC110 - time is what it waits for
        await asyncio.sleep(left_s)
