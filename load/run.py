"""One run: starts the workers, deals the plan out to them, gathers their reports."""

import multiprocessing
import resource
import time
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Final, Protocol

import msgspec

from load.completion import Dialect
from load.connection import Target
from load.errors import LoadError
from load.plan import Script
from load.preflight import Calibration
from load.record import Progress, Report, RequestRecord, WorkerCrash, WorkerEnd
from load.tenants import Cast
from load.worker import STOP, Assignment, Users, work
from load.workload import Workload

START_DELAY_S: Final = 0.2
WORKER_START_TIMEOUT_S: Final = 60.0
WORKER_STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.25
UNBOUNDED: Final = 1 << 40


class ClosedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Users who wait for their answers."""

    num_users: int
    num_scripts: int | None = None
    """Requests or sessions in all; None = as many as the duration allows."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run needs; nothing in it changes while it runs."""

    target: Target
    dialect: Dialect
    cast: Cast
    workload: Workload
    calibration: Calibration
    scripts: tuple[Script, ...] = ()
    closed: ClosedLoop | None = None
    duration_s: float
    """Of the plan; the run ends when the last answer has ended."""
    num_workers: int = 1
    request_timeout_s: float = 300.0
    max_retries: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run brought."""

    started_at: float
    """Wall-clock seconds since the epoch."""
    wall_s: float
    records: list[RequestRecord]
    ends: list[WorkerEnd]
    is_interrupted: bool = False


class View(Protocol):
    """Watches a run."""

    def update(self, elapsed_s: float, progress: Progress) -> None:
        """Take a worker's news."""
        ...

    def draw(self, elapsed_s: float) -> None:
        """Called a few times per second."""
        ...


def run(job: Job, view: View) -> Outcome:
    """Drive the load until its plan is done; Ctrl-C ends it early. Raises LoadError."""
    if job.closed is None and not job.scripts:
        raise LoadError("the plan has no request: a longer duration or a higher rate is needed")
    _allow_many_connections()
    crew = _Crew(job)
    try:
        start_at = crew.start()
        return _Gathering(crew, view, start_at).run()
    finally:
        crew.end()


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Crew:
    """The worker processes of one run."""

    def __init__(self, job: Job) -> None:
        # Forking a process that has threads (a live view, httpx) is not safe.
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Pipe] = []
        self._processes: list[BaseProcess] = []
        for worker in range(job.num_workers):
            ours, theirs = context.Pipe()
            payload = msgspec.msgpack.encode(_assignment(job, worker))
            process = context.Process(target=work, args=(theirs, payload), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def start(self) -> float:
        """Wait until all are ready, then give them one instant to start at; returns it."""
        for pipe in self.pipes:
            try:
                is_ready = pipe.poll(WORKER_START_TIMEOUT_S) and pipe.recv_bytes() == b"ready"
            except (EOFError, OSError):
                is_ready = False
            if not is_ready:
                raise LoadError("a worker process did not start")
        start_at = time.perf_counter() + START_DELAY_S
        for pipe in self.pipes:
            pipe.send_bytes(msgspec.msgpack.encode(start_at))
        return start_at

    def stop(self) -> None:
        """Ask all workers to end what they do."""
        for pipe in self.pipes:
            if not pipe.closed:
                pipe.send_bytes(STOP)

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each worker; None while it runs."""
        for process in self._processes:
            process.join(POLL_S)
        return [process.exitcode for process in self._processes]

    def end(self) -> None:
        """Leave no process behind."""
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.join(WORKER_STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()


class _Gathering:
    """Takes in reports until every worker has ended."""

    def __init__(self, crew: _Crew, view: View, start_at: float) -> None:
        self._crew = crew
        self._view = view
        self._start_at = start_at
        self._started_at = time.time() + (start_at - time.perf_counter())
        self._records: list[RequestRecord] = []
        self._ends: list[WorkerEnd] = []
        self._open: list[Pipe] = list(crew.pipes)
        self._is_interrupted = False
        self._decode = msgspec.msgpack.Decoder(Report).decode

    def run(self) -> Outcome:
        while self._open:
            try:
                self._poll()
            except KeyboardInterrupt:
                if self._is_interrupted:
                    raise
                self._is_interrupted = True
                self._crew.stop()
        return Outcome(
            started_at=self._started_at,
            wall_s=time.perf_counter() - self._start_at,
            records=sorted(self._records, key=lambda record: record.first_sent_s),
            ends=self._ends,
            is_interrupted=self._is_interrupted,
        )

    def _poll(self) -> None:
        for ready in wait(self._open, timeout=POLL_S):
            assert isinstance(ready, Pipe)
            try:
                message = ready.recv_bytes()
            except (EOFError, OSError):
                raise LoadError(f"a worker process died: exit codes {self._crew.exit_codes()}") from None
            self._take(ready, self._decode(message))
        self._view.draw(time.perf_counter() - self._start_at)

    def _take(self, pipe: Pipe, report: Report) -> None:
        if isinstance(report, Progress):
            self._records.extend(report.records)
            self._view.update(time.perf_counter() - self._start_at, report)
        elif isinstance(report, WorkerEnd):
            self._ends.append(report)
            self._open.remove(pipe)
        elif isinstance(report, WorkerCrash):
            raise LoadError(f"worker {report.worker} failed:\n{report.traceback}")


def _assignment(job: Job, worker: int) -> Assignment:
    return Assignment(
        worker=worker,
        target=job.target,
        dialect=job.dialect,
        tenants=job.cast.tenants,
        workload=job.workload,
        scripts=job.scripts[worker :: job.num_workers],
        users=_users(job, worker),
        words=job.calibration.words,
        tokens_per_word=job.calibration.tokens_per_word,
        overhead_tokens=job.calibration.overhead_tokens,
        request_timeout_s=job.request_timeout_s,
        max_retries=job.max_retries,
    )


def _users(job: Job, worker: int) -> Users | None:
    if job.closed is None:
        return None
    numbers = tuple(range(worker, job.closed.num_users, job.num_workers))
    shares = [source.share if source.rate is None else source.rate for source in job.cast.sources]
    return Users(
        numbers=numbers,
        tenants=tuple(_tenant_of(number, job.closed.num_users, shares) for number in numbers),
        indexes=(worker, job.closed.num_scripts or UNBOUNDED, job.num_workers),
        duration_s=job.duration_s,
    )


def _tenant_of(user: int, num_users: int, shares: list[float]) -> int:
    """Return the tenant of a user so that shares are kept as exactly as whole users allow."""
    position = (user + 0.5) / num_users * sum(shares)
    for tenant, share in enumerate(shares):
        position -= share
        if position < 0:
            return tenant
    return len(shares) - 1
