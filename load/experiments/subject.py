"""Subject: a server under test, and the loads that are driven against it."""

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Console

from load.completion import Dialect
from load.connection import Target
from load.errors import LoadError
from load.live import LiveView
from load.plan import Script, Tenant
from load.preflight import Calibration, Server
from load.report import Report, build_report
from load.run import ClosedLoop, Job, run
from load.tenants import Cast, Source
from load.words import WORDS
from load.workload import Workload

MAX_LATENESS_MS: Final = 100.0
"""The server under test shares our cores: the driver may be later than on a machine of its own."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A server under test."""

    target: Target
    dialect: Dialect
    calibration: Calibration
    keys: dict[str, str] = {}
    """Of its tenants, by name."""

    def open(self, scripts: Sequence[Script], cast: Cast, duration_s: float, workload: Workload) -> Report:
        """Drive scripts when they are due."""
        return self._drive(cast, workload, duration_s, tuple(scripts), None)

    def closed(self, num_users: int, workload: Workload, duration_s: float) -> Report:
        """Drive users who wait for their answers; with the first key, where there are keys."""
        only = Tenant(api_key=next(iter(self.keys.values()), None))
        return self._drive(
            Cast(sources=(Source(tenant=only),)), workload, duration_s, (), ClosedLoop(num_users=num_users)
        )

    def _drive(
        self,
        cast: Cast,
        workload: Workload,
        duration_s: float,
        scripts: tuple[Script, ...],
        closed: ClosedLoop | None,
    ) -> Report:
        job = Job(
            target=self.target,
            dialect=self.dialect,
            cast=cast,
            workload=workload,
            calibration=self.calibration,
            scripts=scripts,
            closed=closed,
            duration_s=duration_s,
            request_timeout_s=600.0,
        )
        with LiveView(job, Console(stderr=True)) as view:
            outcome = run(job, view)
        report = build_report(
            outcome,
            cast,
            {},
            name="experiment",
            duration_s=duration_s,
            warmup_s=0.0,
            cooldown_s=0.0,
            max_lateness_ms=MAX_LATENESS_MS,
        )
        if report.is_interrupted:
            raise LoadError("interrupted")
        if not report.total.answered:
            raise LoadError(f"the server answered none of {report.total.requests}: {report.error_examples}")
        return report


def look_at(target: Target, keys: dict[str, str]) -> Subject:
    """Ask a healthy server what it serves and how it counts tokens. Raises LoadError."""
    with Server(target, next(iter(keys.values()), None)) as server:
        model = server.check_model(None)
        calibration = server.calibrate(WORDS, model, "chat")
    dialect = Dialect(model=model, extra_body={"ignore_eos": True, "temperature": 0})
    return Subject(target=target, dialect=dialect, calibration=calibration, keys=keys)
