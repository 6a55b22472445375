import time

from load.arrivals import parse_rate
from load.completion import Dialect
from load.connection import parse_target
from load.lengths import parse_lengths
from load.preflight import Calibration
from load.record import Progress
from load.run import ClosedLoop, Job, _users, run
from load.tenants import Cast, Source, Tenant
from load.words import WORDS
from load.workload import OpenLoop, Workload, open_schedule


class BusyView:
    """A view that holds the parent up once, as a slow terminal does."""

    def __init__(self) -> None:
        self.num_news = 0

    def update(self, elapsed_s: float, progress: Progress) -> None:  # noqa: ARG002 - a View
        self.num_news += 1
        if self.num_news == 2:
            # Long enough for more reports than a pipe holds.
            time.sleep(1.5)

    def draw(self, elapsed_s: float) -> None:
        pass


def job(url: str, **fields: object) -> Job:
    workload = Workload(input_tokens=parse_lengths("8"), output_tokens=parse_lengths("300"))
    loop = OpenLoop(profile=parse_rate("100", 3.0))
    defaults: dict[str, object] = {
        "target": parse_target(url),
        "dialect": Dialect(model="echo"),
        "cast": Cast(),
        "workload": workload,
        "calibration": Calibration(words=WORDS),
        "scripts": tuple(open_schedule(loop, workload, Cast().sources)),
        "duration_s": 3.0,
    }
    return Job(**defaults | fields)  # type: ignore[arg-type]


def test_a_parent_that_is_slow_to_read_loses_nothing(echo_url: str) -> None:
    plan = job(echo_url)
    outcome = run(plan, BusyView())
    assert sorted(record.script for record in outcome.records) == list(range(len(plan.scripts)))
    assert not outcome.is_interrupted


def test_users_and_their_tenants_do_not_depend_on_the_workers() -> None:
    cast = Cast(sources=(Source(tenant=Tenant(name="a"), share=3.0), Source(tenant=Tenant(name="b"))))
    plan = job(
        "http://a:1", cast=cast, closed=ClosedLoop(num_users=8, num_scripts=20), scripts=(), num_workers=3
    )
    parts = [users for worker in range(3) if (users := _users(plan, worker)) is not None]
    tenants = {n: t for part in parts for n, t in zip(part.numbers, part.tenants, strict=True)}
    assert [tenants[number] for number in range(8)] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert sorted(i for part in parts for i in range(*part.indexes)) == list(range(20))
