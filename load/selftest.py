"""What the tool itself costs: many streams of a local server that does nothing but stream."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Final

import msgspec
from rich.console import Console

from load.arrivals import parse_rate
from load.completion import Dialect
from load.connection import Target
from load.echo import MODEL, Pace, run_echo
from load.errors import LoadError
from load.lengths import Lengths
from load.live import LiveView
from load.page import html_table, page
from load.preflight import Calibration
from load.report import Report, build_report
from load.run import Job, run
from load.table import Row, markdown_table, number
from load.tenants import Cast
from load.words import WORDS
from load.workload import OpenLoop, Workload, open_schedule

MAX_CPU_US_PER_TOKEN: Final = 30.0
MAX_LATENESS_MS: Final = 5.0
ANSWER_S: Final = 10.0
TTFT_MS: Final = 20.0
JITTER: Final = 0.05
"""Without it all answers keep in step with the arrivals: every request is due in the middle of a burst."""
ECHO_START_TIMEOUT_S: Final = 30.0


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """What one driver process did. Limits are this project's own."""

    streams_asked: int
    streams_held: int
    """Fewest in flight at the end of any time bin of the measured part."""
    tokens_per_s: float
    cpu_us_per_token: float
    max_cpu_us_per_token: float = MAX_CPU_US_PER_TOKEN
    lateness_ms_p99: float
    max_lateness_ms: float = MAX_LATENESS_MS
    loop_lag_ms_p99: float
    ttft_ms_true: float
    ttft_ms_p50: float
    itl_ms_true: float
    itl_ms_p50: float
    itl_ms_p99: float
    failed: int

    @property
    def has_passed(self) -> bool:
        return (
            self.cpu_us_per_token <= self.max_cpu_us_per_token
            and self.lateness_ms_p99 <= self.max_lateness_ms
            and self.streams_held >= 0.98 * self.streams_asked
            and self.failed == 0
        )


def selftest(
    streams: int, tokens_per_s: float, duration_s: float, console: Console, *, answer_s: float = ANSWER_S
) -> SelfTest:
    """Hold `streams` answers of `answer_s` each for `duration_s`. Raises LoadError."""
    itl_ms = streams / tokens_per_s * 1e3
    # Little's law: as many arrivals per second as keep `streams` open.
    with echo_process(Pace(ttft_ms=TTFT_MS, itl_ms=itl_ms, jitter=JITTER)) as port:
        job = _job(port, streams / answer_s, max(2, round(answer_s * 1e3 / itl_ms)), answer_s + duration_s)
        with LiveView(job, console) as view:
            outcome = run(job, view)
    report = build_report(
        outcome,
        job.cast,
        {},
        name="selftest",
        duration_s=job.duration_s,
        # Until the first answers end, streams are still being opened.
        warmup_s=answer_s,
        cooldown_s=0.0,
        max_lateness_ms=MAX_LATENESS_MS,
    )
    return _result(report, streams, itl_ms)


def _job(port: int, rate: float, output_tokens: int, duration_s: float) -> Job:
    workload = Workload(
        input_tokens=Lengths(law="fixed", a=32), output_tokens=Lengths(law="fixed", a=output_tokens)
    )
    cast = Cast()
    loop = OpenLoop(profile=parse_rate(f"{rate}", duration_s), law="constant")
    return Job(
        target=Target(host="127.0.0.1", port=port),
        dialect=Dialect(model=MODEL),
        cast=cast,
        workload=workload,
        calibration=Calibration(words=WORDS),
        scripts=tuple(open_schedule(loop, workload, cast.sources)),
        duration_s=duration_s,
    )


def _result(report: Report, streams: int, itl_ms: float) -> SelfTest:
    total, driver = report.total, report.driver
    if total.ttft_ms is None or total.itl_ms is None or driver.cpu_us_per_token is None:
        raise LoadError(f"the echo server did not answer: {report.error_examples}")
    from_s, to_s = report.window_s
    held = [one.in_flight for one in report.series.bins if from_s < one.at_s < to_s - report.series.bin_s]
    return SelfTest(
        streams_asked=streams,
        streams_held=min(held, default=0),
        tokens_per_s=_steady_tokens_per_s(report),
        cpu_us_per_token=driver.cpu_us_per_token,
        lateness_ms_p99=driver.lateness_ms_p99,
        loop_lag_ms_p99=driver.loop_lag_ms_p99,
        ttft_ms_true=TTFT_MS,
        ttft_ms_p50=total.ttft_ms.p50,
        itl_ms_true=itl_ms,
        itl_ms_p50=total.itl_ms.p50,
        itl_ms_p99=total.itl_ms.p99,
        failed=total.failed,
    )


def _steady_tokens_per_s(report: Report) -> float:
    from_s, to_s = report.window_s
    rates = [
        one.output_tokens_per_s
        for one in report.series.bins
        if from_s <= one.at_s <= to_s - report.series.bin_s
    ]
    return sum(rates) / len(rates) if rates else 0.0


@contextmanager
def echo_process(pace: Pace) -> Iterator[int]:
    """Run the echo server in a process of its own; gives its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_echo, args=(theirs, msgspec.msgpack.encode(pace)), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            if not ours.poll(ECHO_START_TIMEOUT_S):
                raise LoadError("the echo server did not start")
            port: int = ours.recv()
        except EOFError:
            raise LoadError("the echo server died while starting") from None
        yield port
    finally:
        process.kill()
        process.join()
        ours.close()


def _be_echo(pipe: Pipe, pace: bytes) -> None:
    run_echo(msgspec.msgpack.decode(pace, type=Pace), "127.0.0.1", 0, pipe.send)


def _rows(result: SelfTest) -> list[Row]:
    return [
        ("Streams held at once", f"{result.streams_held}", f">= 98% of {result.streams_asked}"),
        ("Tokens per second", number(result.tokens_per_s), ""),
        ("CPU per token, us", number(result.cpu_us_per_token), f"<= {result.max_cpu_us_per_token:g}"),
        ("Lateness P99, ms", number(result.lateness_ms_p99), f"<= {result.max_lateness_ms:g}"),
        ("Timer lag P99, ms", number(result.loop_lag_ms_p99), ""),
        ("TTFT p50, ms", number(result.ttft_ms_p50), f"server: {result.ttft_ms_true:g} on average"),
        ("ITL p50 and P99, ms", f"{number(result.itl_ms_p50)}, {number(result.itl_ms_p99)}",
         f"server: {result.itl_ms_true:g} on average, sigma {JITTER:.0%}"),
        ("Failed", str(result.failed), "0"),
    ]  # fmt: skip


def selftest_markdown(result: SelfTest) -> str:
    """Return the result as a Markdown page."""
    verdict = "passed" if result.has_passed else "NOT passed"
    return f"# Self-test: {verdict}\n\n{markdown_table(('', 'measured', 'wanted'), _rows(result))}\n"


def selftest_html(result: SelfTest) -> str:
    """Return the result as a page."""
    verdict = "passed" if result.has_passed else "not passed"
    table = html_table(("", "measured", "wanted"), _rows(result))
    return page("Self-test", [f"<h1>Self-test: {verdict}</h1>", table])
