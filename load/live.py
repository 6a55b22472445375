"""What the person at the terminal sees while a run goes on. Runs in the parent, never in a worker."""

import math
from collections import Counter, deque
from typing import Final

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from load.measures import event_gaps_ms, ttft_ms
from load.record import Progress as News
from load.report import error_name
from load.run import Job
from load.statistics import Floats

RECENT_REQUESTS: Final = 200
RATE_WINDOW: Final = 8
LINE_EVERY_S: Final = 5.0


class LiveView:
    """A progress bar and the latencies of the last 200 answers; a line every 5 s where there is no terminal.

    Use as a context manager around the run.
    """

    def __init__(self, job: Job, console: Console) -> None:
        self._console = console
        self._num_planned = len(job.scripts) if job.closed is None else job.closed.num_scripts or math.inf
        self._is_closed = job.closed is not None
        self._duration_s = job.duration_s
        self._news: dict[int, News] = {}
        self._errors: Counter[str] = Counter()
        self._num_answered = 0
        self._ttft: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._gaps: deque[Floats] = deque(maxlen=RECENT_REQUESTS)
        self._tokens: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._last_line_s = 0.0
        self._bar = Progress(
            TextColumn("[progress.description]{task.description}"), BarColumn(), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("load", total=1.0)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, elapsed_s: float, progress: News) -> None:
        """Take a worker's news."""
        self._news[progress.worker] = progress
        self._tokens.append((elapsed_s, sum(news.output_events for news in self._news.values())))
        for record in progress.records:
            if record.failure is not None:
                self._errors[error_name(record)] += 1
                continue
            self._num_answered += 1
            if record.is_slow:
                continue
            if (first := ttft_ms(record)) is not None:
                self._ttft.append(first)
            self._gaps.append(event_gaps_ms(record))

    def draw(self, elapsed_s: float) -> None:
        """Show where the run is."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._fraction(elapsed_s))
            self._live.update(Group(self._bar, self._table()), refresh=True)
        elif elapsed_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = elapsed_s
            cells = "  ".join(f"{name} {value}" for name, value in self._figures())
            self._console.print(f"{elapsed_s:5.0f} s  {cells}", highlight=False, soft_wrap=True)

    def _fraction(self, elapsed_s: float) -> float:
        done = (self._num_answered + self._errors.total()) / self._num_planned
        # A closed loop ends with its time or with its requests, whichever comes first.
        return min(1.0, max(done, elapsed_s / self._duration_s) if self._is_closed else done)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 3))
        figures = self._figures()
        table.add_row(*(f"[dim]{name}[/dim]" for name, _ in figures))
        table.add_row(*(value for _, value in figures))
        return table

    def _figures(self) -> list[tuple[str, str]]:
        news = self._news.values()
        errors = ", ".join(f"{name} {count}" for name, count in self._errors.most_common(3)) or "0"
        return [
            ("sent", str(sum(one.started for one in news))),
            ("in flight", str(sum(one.in_flight for one in news))),
            ("answered", str(self._num_answered)),
            ("errors", errors),
            ("tokens/s", self._token_rate()),
            ("TTFT p50/p99 ms", _p50_p99(np.array(self._ttft))),
            ("ITL p50/p99 ms", _p50_p99(np.concatenate(list(self._gaps) or [np.empty(0)]))),
        ]

    def _token_rate(self) -> str:
        if len(self._tokens) < 2:
            return "-"
        (from_s, before), (to_s, after) = self._tokens[0], self._tokens[-1]
        return f"{(after - before) / (to_s - from_s):.0f}" if to_s > from_s else "-"


def _p50_p99(values: Floats) -> str:
    if not len(values):
        return "-"
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return f"{p50:.0f}/{p99:.0f}"
