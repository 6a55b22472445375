"""Demand: seats, and requests of one size that are more or fewer than those seats can serve."""

from typing import Any

import msgspec

from load.arrivals import parse_rate
from load.experiments.headway import Lab
from load.experiments.subject import Subject
from load.lengths import Lengths
from load.plan import Script
from load.report import Report
from load.tenants import Cast
from load.workload import OpenLoop, Workload, open_schedule

CAPACITY_S = 10.0
"""How long the capacity of a server is measured."""
WAVES = 8
"""Of requests through all seats, in which the capacity of a profile is measured."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered to how many seats."""

    seats: int
    input_tokens: int
    output_tokens: int
    num_requests: int
    """Of each load: slow machines take longer instead of seeing less."""
    seed: int = 0

    @property
    def engine(self) -> dict[str, Any]:
        return {"max_num_seqs": self.seats, "enable_prefix_caching": False}

    @property
    def workload(self) -> Workload:
        return Workload(
            input_tokens=Lengths(law="fixed", a=self.input_tokens),
            output_tokens=Lengths(law="fixed", a=self.output_tokens),
            seed=self.seed,
        )

    def capacity(self, subject: Subject) -> float:
        """Measure the requests per second that the seats of a server serve."""
        return self.served_per_s(subject.closed(self.seats, self.workload, CAPACITY_S))

    def simulated_capacity(self, lab: Lab) -> float:
        """Return the requests per second that the seats of the lab's profile serve."""
        measured = lab.simulated_bench(
            "engine", "--concurrency", str(self.seats), "--requests", str(WAVES * self.seats), "--sigma", "0",
            "--input-tokens", str(self.input_tokens), "--output-tokens", str(self.output_tokens),
        )  # fmt: skip
        return float(measured["output_tokens_per_s"]) / self.output_tokens

    def served_per_s(self, report: Report) -> float:
        """Return requests per second by their tokens: answers that are half done count by half."""
        return report.total.output_tokens_per_s / self.output_tokens

    def scripts(self, rate: float, cast: Cast) -> list[Script]:
        """Draw Poisson arrivals at so many requests per second."""
        loop = OpenLoop(profile=parse_rate(f"{rate}", self.num_requests / rate))
        return open_schedule(loop, self.workload, cast.sources)

    def drive(self, subject: Subject, rate: float, cast: Cast) -> Report:
        """Offer them to a server."""
        return subject.open(self.scripts(rate, cast), cast, self.num_requests / rate, self.workload)


def here(lab: Lab) -> Demand:
    """Return what a CPU can be asked for."""
    num_requests = 60 if lab.is_quick else 200
    return Demand(seats=4, input_tokens=32, output_tokens=24, num_requests=num_requests, seed=lab.seed)


def simulated(lab: Lab) -> Demand:
    """Return what a GPU is bought for."""
    return Demand(seats=64, input_tokens=512, output_tokens=256, num_requests=2400, seed=lab.seed)
