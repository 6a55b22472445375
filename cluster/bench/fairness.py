"""`headway bench fairness`: the service gap between tenants, at every step, against VTC's bound; and what
admission and dispatch of one request cost in a full queue.

A batch of seats serves tenants that come and go, some with long prompts, some with floods of short ones.
For every pair of tenants and every stretch of steps during which both have queued work on every router,
the difference of their weighted service is followed; the largest swing is the gap.
"""

import argparse
import itertools
import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from cluster.bench.report import commit, percentile
from replicas.api import ReplicaLoad
from router.admission import Admission, Ahead
from router.dispatch import Dispatcher, Turn, Verdict, Waiting
from router.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, FairQueue, service
from router.prefix_index import PrefixIndex, prefix_hashes
from router.routing import Candidate, choose
from router.tenants import DEFAULT_TIERS

NAME = "fairness"
HELP = "service gap between backlogged tenants under virtual token counters and under FCFS"

SEATS: Final = 16
LONGEST_INPUT: Final = 400
LONGEST_OUTPUT: Final = 120
EXCHANGE_STEPS: Final = 5
"""Routers tell each other of service every 100 ms; a step takes 20 ms here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """How a tenant behaves: requests per step while it is on, and its lengths."""

    name: str
    rate: float
    weight: float
    mean_input: int
    mean_output: int


TENANTS: Final = (
    Tenant(name="steady", rate=0.2, weight=1.0, mean_input=60, mean_output=40),
    Tenant(name="flood", rate=3.0, weight=1.0, mean_input=60, mean_output=40),
    Tenant(name="prompts", rate=0.4, weight=1.0, mean_input=300, mean_output=5),
    Tenant(name="answers", rate=0.4, weight=1.0, mean_input=10, mean_output=100),
    Tenant(name="heavy", rate=0.5, weight=2.0, mean_input=100, mean_output=60),
    Tenant(name="light", rate=0.3, weight=0.5, mean_input=100, mean_output=60),
)


@dataclass(slots=True, eq=False)
class Request:
    tenant: Tenant
    key: int
    num_input: int
    num_output: int
    """Still to be generated."""


class Queue(Protocol):
    """A router's queue: who is next, and what service it hears of."""

    def push(self, request: Request) -> None: ...
    def pop(self) -> Request | None: ...
    def charge(self, tenant: Tenant, amount: float) -> None: ...
    def backlogged(self) -> set[str]: ...


class VtcQueue:
    """The production queue."""

    def __init__(self) -> None:
        self._queue: FairQueue[Request] = FairQueue()

    def push(self, request: Request) -> None:
        self._queue.push(request.tenant.name, request.key, request)

    def pop(self) -> Request | None:
        head = self._queue.head()
        return None if head is None else self._queue.remove(head.tenant, head.key)

    def charge(self, tenant: Tenant, amount: float) -> None:
        self._queue.charge(tenant.name, amount, tenant.weight)

    def backlogged(self) -> set[str]:
        return self._queue.tenants


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def pop(self) -> Request | None:
        return self._queue.popleft() if self._queue else None

    def charge(self, tenant: Tenant, amount: float) -> None:
        """Service changes nothing here."""

    def backlogged(self) -> set[str]:
        return {request.tenant.name for request in self._queue}


class Gaps:
    """The largest swing of any pair's difference in weighted service while both were backlogged."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.served = {tenant.name: 0.0 for tenant in TENANTS}
        self._ranges: dict[tuple[str, str], list[float]] = {}  # pair -> lowest, highest difference

    def observe(self, backlogged: set[str]) -> None:
        for pair in itertools.combinations(self.served, 2):
            if not backlogged.issuperset(pair):
                self._ranges.pop(pair, None)
                continue
            difference = self.served[pair[0]] - self.served[pair[1]]
            bounds = self._ranges.setdefault(pair, [difference, difference])
            bounds[0], bounds[1] = min(bounds[0], difference), max(bounds[1], difference)
            self.largest = max(self.largest, bounds[1] - bounds[0])


def vtc_bound(num_routers: int) -> float:
    """Theorem 4.4 for the smallest weight, plus what routers serve between two exchanges.

    What a batch has begun can no longer be steered: M are the output tokens of all its seats.
    """
    smallest = min(tenant.weight for tenant in TENANTS)
    alone = 2 * max(INPUT_WEIGHT * LONGEST_INPUT, OUTPUT_WEIGHT * SEATS * LONGEST_OUTPUT) / smallest
    if num_routers == 1:
        return alone
    # Until the others hear of it, each router may refill all seats, and every seat may go on.
    unheard = SEATS * (INPUT_WEIGHT * LONGEST_INPUT + OUTPUT_WEIGHT * EXCHANGE_STEPS) / smallest
    return alone + (num_routers - 1) * unheard


def largest_gap(queues: list[Queue], num_steps: int, seed: int) -> float:
    """Run the simulation with one queue per router; return the largest gap seen at any step."""
    draw = random.Random(seed)
    keys = itertools.count()
    gaps = Gaps()
    running: list[Request] = []
    unheard: list[list[tuple[Tenant, float]]] = [[] for _ in queues]
    on = {tenant.name: True for tenant in TENANTS}
    origin: dict[int, int] = {}

    def charge(router: int, tenant: Tenant, amount: float) -> None:
        gaps.served[tenant.name] += amount / tenant.weight
        queues[router].charge(tenant, amount)
        unheard[router].append((tenant, amount))

    for step in range(num_steps):
        _arrive(queues, on, keys, draw)
        turns = itertools.cycle(range(len(queues)))
        for router in itertools.islice(turns, step % len(queues), step % len(queues) + 4 * SEATS):
            if len(running) >= SEATS:
                break
            request = queues[router].pop()
            if request is not None:
                origin[request.key] = router
                running.append(request)
                charge(router, request.tenant, service(request.num_input))
        generated: Counter[tuple[int, Tenant]] = Counter()
        for request in running:
            request.num_output -= 1
            generated[origin[request.key], request.tenant] += 1
        for (router, tenant), count in generated.items():
            charge(router, tenant, service(0, count))
        running = [request for request in running if request.num_output]
        if step % EXCHANGE_STEPS == 0:
            _exchange(queues, unheard)
        gaps.observe(set.intersection(*(queue.backlogged() for queue in queues)))
    return gaps.largest


def _arrive(
    queues: list[Queue], on: dict[str, bool], keys: "itertools.count[int]", draw: random.Random
) -> None:
    for tenant in TENANTS:
        if draw.random() < 0.0005:
            on[tenant.name] = not on[tenant.name]
        if not on[tenant.name]:
            continue
        count = int(tenant.rate) + (draw.random() < tenant.rate % 1)
        for _ in range(min(count, 3)):
            num_input = min(LONGEST_INPUT, 1 + int(draw.expovariate(1 / tenant.mean_input)))
            num_output = min(LONGEST_OUTPUT, 1 + int(draw.expovariate(1 / tenant.mean_output)))
            request = Request(tenant, next(keys), num_input, num_output)
            draw.choice(queues).push(request)


def _exchange(queues: list[Queue], unheard: list[list[tuple[Tenant, float]]]) -> None:
    for router, charges in enumerate(unheard):
        for tenant, amount in charges:
            for other, queue in enumerate(queues):
                if other != router:
                    queue.charge(tenant, amount)
        charges.clear()


def dispatch_us(num_queued: int, num_tenants: int, num_requests: int, seed: int) -> list[float]:
    """CPU time of admission, queueing and dispatch of single requests while `num_queued` others wait.

    With 8 replicas, prefix views of 1,000 prompts each, and prompts of 1,024 tokens whose hashes are part
    of the work.
    """
    draw = random.Random(seed)
    dispatcher = Dispatcher({})
    admission = Admission(DEFAULT_TIERS, draw)
    prompts = [[draw.randrange(50_000) for _ in range(1024)] for _ in range(100)]
    views = {f"r{i}": PrefixIndex(16_000) for i in range(8)}
    for view in views.values():
        for prompt in draw.sample(prompts, 50):
            view.note(prefix_hashes(prompt, ""))
    loads = [ReplicaLoad(step_ms=20.0, prefill_tokens_per_s=1e4) for _ in views]
    keys = itertools.count()

    def waiting() -> Waiting:
        key = next(keys)
        tenant = f"tenant-{draw.randrange(num_tenants)}"
        return Waiting(
            key=key, tenant=tenant, tier=key % 3, num_outputs=1, num_tokens=1024, max_tokens=64, queued_at=0.0
        )

    for _ in range(num_queued):
        dispatcher.add(waiting())
    times = []
    for number in range(num_requests):
        newcomer, prompt = waiting(), draw.choice(prompts)
        is_placed = False

        def place(turn: Turn, hashes: list[int]) -> Verdict:
            nonlocal is_placed
            best = turn.waiting
            if is_placed:
                return Verdict.NO_SEAT
            candidates = [
                Candidate(replica=name, num_busy=30, matched=view.match(hashes) / len(hashes))
                for name, view in views.items()
            ]
            views[choose(candidates, draw).replica].note(hashes)
            dispatcher.charge(best.tier, best.tenant, 1024.0, 1.0)
            is_placed = True
            return Verdict.PLACED

        started_at = time.thread_time()
        num_better = dispatcher.num_ahead(newcomer.tier - 1)
        ahead = Ahead(
            num_outputs=num_better + dispatcher.num_before(newcomer.tier, newcomer.tenant),
            num_better=num_better,
            num_sent=0.0,
            num_sent_better=0.0,
            num_open=0,
            num_requests=dispatcher.num_waiting(newcomer.tier),
            queued_tokens=dispatcher.queued_tokens,
            has_room=False,
            has_seat=False,
            num_prompt_tokens=newcomer.num_tokens,
        )
        admission.note_end(newcomer.tier, 1.0, number / 100, is_saturated=True)
        admission.decide(newcomer.tier, ahead, loads, number / 100)
        hashes = prefix_hashes(prompt, "")
        dispatcher.add(newcomer)
        dispatcher.dispatch(number / 100, partial(place, hashes=hashes))
        times.append((time.thread_time() - started_at) * 1e6)
        assert len(dispatcher) == num_queued
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--routers", type=int, default=1, help="routers that share the seats (default 1)")
    parser.add_argument("--steps", type=int, default=100_000, help="engine steps (default 100000)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    vtc: list[Queue] = [VtcQueue() for _ in range(args.routers)]
    fcfs: list[Queue] = [FcfsQueue() for _ in range(args.routers)]
    times = dispatch_us(num_queued=10_000, num_tenants=500, num_requests=3_000, seed=args.seed)
    return {
        "vtc_bound": vtc_bound(args.routers),
        "vtc_max_gap": largest_gap(vtc, args.steps, args.seed),
        "fcfs_max_gap": largest_gap(fcfs, min(args.steps, 5_000), args.seed),
        "steps": args.steps,
        "routers": args.routers,
        "dispatch_us_p50": percentile(times, 50),
        "dispatch_us_p99": percentile(times, 99),
        "queued": 10_000,
        "commit": commit(),
    }
