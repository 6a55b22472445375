"""Autoscaling: how many replicas there should be, and why. Pure: the same in Serve and in the simulator.

`decide` is asked every few seconds with what routers and replicas reported, and with its own last state.
Up: at once, to the most that any signal asks for, at most twofold per cold start; replicas that are
starting count. Down: one at a time, and only when what is left would have been enough all the time,
with a margin, for several cold starts. Missing or impossible data holds; the minimum holds always.
What a policy may contain: cluster/autoscaling_policy.py.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.autoscaling_history import LONG_S, SHORT_S, History, problem
from cluster.autoscaling_needs import (
    NUM_DEMAND_SPANS,
    Capacity,
    Loads,
    ReplicaReport,
    Violation,
    infeasible,
    loads,
    violations,
)
from cluster.autoscaling_policy import Policy
from router.counters import RouterCounters

MAX_GAP_S: Final = 60.0
"""Two decisions further apart have nothing to do with each other: the clock jumped, or nobody asked."""
SILENT_S: Final = 15.0
UP_FACTOR: Final = 2
"""At most so many times the replicas that were there a cold start ago."""
PERSISTENT_S: Final = 10.0
"""A queue that is gone after so long needs no replica: none would come in time."""


MAX_START_S: Final = 600.0
"""What takes longer waited for something that no later start has to wait for."""
MAX_BURST: Final = 2.0
BURST_MEMORY_S: Final = 3600.0
"""What was learned of bursts fades with this time constant."""


class Code(enum.StrEnum):
    """Why a target is what it is."""

    RATE = "rate"
    QUEUE = "queue"
    ITL = "itl"
    KV = "kv"
    LIMIT = "cold_start_limit"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    LESS = "less"
    WAIT = "downscale_wait"
    VIOLATION = "violation"
    STARTING = "starting"
    NO_DATA = "no_data"
    SILENT = "silent"
    GARBAGE = "garbage"
    CLOCK = "clock"
    INFEASIBLE = "infeasible"
    STEADY = "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One thing that decided, in words."""

    code: Code
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known at the moment of a decision."""

    target: int
    """Replicas as last decided, whether they are there or not."""
    running: int
    """Those that serve. Draining ones are none."""
    routers: tuple[RouterCounters, ...] = ()
    """The latest report of each router; more of one do no harm. None at all = no data, not no traffic."""
    replicas: tuple[ReplicaReport, ...] = ()
    """Of running replicas only."""

    @property
    def starting(self) -> int:
        return max(0, self.target - self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most replicas that were needed at some moment."""

    at: float
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `decide` remembers from one decision to the next."""

    history: History = field(default_factory=History)
    capacity: Capacity = field(default_factory=Capacity)
    waits: tuple[tuple[float, Loads], ...] = ()
    """The loads of the last seconds, to tell a queue that stays from one that passes."""
    peaks: tuple[Peak, ...] = ()
    """Falling: the highest load since each of these moments."""
    calm_since: float | None = None
    """Since when all data came and no promise was broken."""
    changed_at: float | None = None
    """When the target was last changed."""
    up_at: float | None = None
    """When the present doubling began."""
    up_base: int = 0
    """How many replicas were wanted then."""
    starting_since: float | None = None
    """Since when some replicas that are wanted do not serve yet."""
    start_s: float = 0.0
    """How long that lasted the last time."""
    burst: float = 1.0
    """Demand counts so many times: what was too little before, because requests do not come evenly."""
    reported: frozenset[str] = frozenset()
    """Infeasible targets that were reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas there should be."""

    target: int
    reasons: tuple[Reason, ...]
    state: State
    """For the next decision."""
    loads: Loads | None = None
    """What the signals asked for; None when it was not computed."""


def decide(observation: Observation, state: State, policy: Policy, now: float) -> Decision:
    """Return the target for this moment. `now` is any clock in seconds; jumps of it do no harm."""
    last_at = state.history.at
    if last_at is not None and not 0 <= now - last_at <= MAX_GAP_S:
        text = f"{now - last_at:+.0f} s since the last decision: holding, with a new history"
        fresh = State(capacity=state.capacity, burst=state.burst, reported=state.reported)
        clock = Reason(code=Code.CLOCK, text=text)
        return _hold(observation, _looked(observation, fresh, policy, now), policy, (clock,))
    garbage = _garbage(observation)
    state = _looked(observation, state, policy, now)
    news = infeasible(state.history, state.capacity, policy, now)
    reasons = garbage + tuple(
        Reason(code=Code.INFEASIBLE, text=text) for key, text in news.items() if key not in state.reported
    )
    state = replace(state, reported=state.reported | news.keys())
    state = _faded(state, last_at, now)
    now_loads = loads(state.history, state.capacity, _sane(observation.replicas), policy, now)
    missing = _missing(state, now_loads)
    if missing is not None:
        state = replace(state, calm_since=None, waits=(), peaks=())
        return _hold(observation, state, policy, (*reasons, missing))
    # What no number of replicas can keep must not hold any.
    broken = [v for v in violations(state.history, policy, now) if v.promise not in news]
    return _weigh(observation, state, policy, now_loads, broken, reasons, now)


def _looked(observation: Observation, state: State, policy: Policy, now: float) -> State:
    """Take over what was reported, as far as it is possible."""
    kept_s = max(LONG_S, NUM_DEMAND_SPANS * policy.demand_span_s)
    routers = [report for report in observation.routers if problem(report) is None]
    state = replace(
        state,
        history=state.history.advanced(routers, now, kept_s),
        capacity=state.capacity.updated(_sane(observation.replicas)),
    )
    if observation.starting:
        return state if state.starting_since is not None else replace(state, starting_since=now)
    if state.starting_since is None:
        return state
    start_s = min(now - state.starting_since, MAX_START_S)
    return replace(state, starting_since=None, start_s=start_s)


def _cold_start_s(state: State, policy: Policy) -> float:
    """What a replica needs to start: the node it may wait for included, as far as that was seen."""
    return max(state.capacity.cold_start_s, state.start_s) or policy.cold_start_s


def _sane(reports: Iterable[ReplicaReport]) -> tuple[ReplicaReport, ...]:
    return tuple(report for report in reports if report.problem() is None)


def _garbage(observation: Observation) -> tuple[Reason, ...]:
    found = [(f"router {r.router}", problem(r)) for r in observation.routers]
    found += [(f"replica {r.replica}", r.problem()) for r in observation.replicas]
    return tuple(
        Reason(code=Code.GARBAGE, text=f"{name} is not believed: {what}") for name, what in found if what
    )


def _missing(state: State, now_loads: Loads) -> Reason | None:
    """Why no target can be computed; None if one can."""
    if not state.history.routers:
        return Reason(code=Code.NO_DATA, text="no router has reported")
    if now_loads.rate is None or now_loads.queue is None:
        return Reason(code=Code.NO_DATA, text="how fast a replica works is not known yet")
    return None


def _hold(observation: Observation, state: State, policy: Policy, reasons: tuple[Reason, ...]) -> Decision:
    target, bound = _bounded(observation.target, policy)
    return Decision(target=target, reasons=reasons + bound, state=state)


def _bounded(wanted: int, policy: Policy) -> tuple[int, tuple[Reason, ...]]:
    if wanted > policy.max_replicas:
        text = f"{wanted} are wanted, max_replicas is {policy.max_replicas}"
        return policy.max_replicas, (Reason(code=Code.MAXIMUM, text=text),)
    if wanted < policy.min_replicas:
        return policy.min_replicas, (
            Reason(code=Code.MINIMUM, text=f"min_replicas is {policy.min_replicas}"),
        )
    return wanted, ()


def _weigh(
    observation: Observation,
    state: State,
    policy: Policy,
    now_loads: Loads,
    broken: Sequence[Violation],
    reasons: tuple[Reason, ...],
    now: float,
) -> Decision:
    """Compare what is there with what is needed."""
    waits = (*((at, load) for at, load in state.waits if now - at <= SHORT_S), (now, now_loads))
    state = replace(state, waits=waits)
    lasting = _lasting(waits, now)
    reasons += tuple(Reason(code=Code.VIOLATION, text=v.text) for v in broken)
    if any(v.kind != "itl" for v in broken):
        state = _learned(observation, state, lasting, now)
    lasting = replace(lasting, rate=(lasting.rate or 0.0) * state.burst)
    is_at_floor = any(report.is_at_floor for report in _sane(observation.replicas))
    counts_itl = is_at_floor and any(v.kind == "itl" for v in broken)
    wants = _wants(lasting, policy, state.burst, counts_itl)
    silence = _silence(observation, state, now)
    state = _remembered(state, lasting, policy, now, is_calm=not broken and silence is None)
    wanted = max((want for want, _ in wants), default=0)
    if wanted > observation.target:
        decision = _up(observation, state, policy, wanted, now)
        asked = tuple(reason for want, reason in wants if want > observation.target)
    else:
        decision = _down(observation, state, policy, silence, now)
        asked = ()
    return replace(decision, reasons=reasons + asked + decision.reasons, loads=lasting)


def _lasting(waits: tuple[tuple[float, Loads], ...], now: float) -> Loads:
    """The loads of now, with the least queue and KV demand of the last seconds instead of this moment's."""
    latest = waits[-1][1]
    if now - waits[0][0] < PERSISTENT_S:
        return replace(latest, queue=0.0, kv=0.0)
    return replace(
        latest,
        queue=min(load.queue or 0.0 for _, load in waits),
        kv=min(load.kv for _, load in waits),
    )


def _faded(state: State, last_at: float | None, now: float) -> State:
    left = math.exp(-(now - last_at) / BURST_MEMORY_S) if last_at is not None else 1.0
    return replace(state, burst=1.0 + (state.burst - 1.0) * left)


def _learned(observation: Observation, state: State, lasting: Loads, now: float) -> State:
    """Requests start late although there should be enough: count demand so much higher that it asks for one
    more. Only when all that are wanted have served for as long as is looked back."""
    is_settled = state.changed_at is None or now - state.changed_at >= LONG_S
    if observation.starting or not is_settled or not lasting.rate:
        return state
    burst = (observation.target + 0.5) / lasting.rate
    return replace(state, burst=max(state.burst, min(MAX_BURST, burst)))


def _wants(lasting: Loads, policy: Policy, burst: float, counts_itl: bool) -> list[tuple[int, Reason]]:
    rate, queue = lasting.rate or 0.0, lasting.queue or 0.0
    bursts = f", {burst:.2f} times for bursts" if burst > 1.005 else ""
    wants = [
        (
            math.ceil(rate),
            Reason(
                code=Code.RATE,
                text=f"{rate / burst * policy.utilisation:.2f} s of work per second at "
                f"{policy.utilisation:.0%} each{bursts}: {math.ceil(rate)}",
            ),
        ),
        (
            math.ceil(queue),
            Reason(code=Code.QUEUE, text=f"what waits must begin in time: {math.ceil(queue)}"),
        ),
        (
            math.ceil(lasting.kv),
            Reason(code=Code.KV, text=f"sequences want the KV pools of {math.ceil(lasting.kv)}"),
        ),
    ]
    if counts_itl:
        text = f"the chunk is at its floor and batches are too large: {math.ceil(lasting.itl)}"
        wants.append((math.ceil(lasting.itl), Reason(code=Code.ITL, text=text)))
    return wants


def _silence(observation: Observation, state: State, now: float) -> Reason | None:
    """Who says nothing although it should; None if everybody has spoken."""
    if silent := state.history.silent(now, SILENT_S):
        return Reason(code=Code.SILENT, text=f"router {silent[0]} is silent: not fewer replicas now")
    num_sane = len(_sane(observation.replicas))
    if num_sane < observation.running:
        text = f"{num_sane} of {observation.running} replicas report: not fewer now"
        return Reason(code=Code.SILENT, text=text)
    return None


def _remembered(state: State, lasting: Loads, policy: Policy, now: float, *, is_calm: bool) -> State:
    """Note this moment's load as what a smaller number of replicas would have to bear."""
    if not is_calm:
        return replace(state, calm_since=None, peaks=())
    load = max(lasting.rate or 0.0, lasting.queue or 0.0, lasting.itl, lasting.kv)
    cold_start_s = _cold_start_s(state, policy)
    kept_s = max(policy.down_delay_s(cold_start_s), policy.zero_delay_s(cold_start_s))
    higher = [peak for peak in state.peaks if peak.load > load and now - peak.at <= kept_s]
    return replace(
        state,
        calm_since=now if state.calm_since is None else state.calm_since,
        peaks=(*higher, Peak(at=now, load=load)),
    )


def _up(observation: Observation, state: State, policy: Policy, wanted: int, now: float) -> Decision:
    """More, at once; but not more than twofold before the last ones have had time to start."""
    cold_start_s = _cold_start_s(state, policy)
    if state.up_at is None or now - state.up_at >= cold_start_s:
        state = replace(state, up_at=now, up_base=observation.target)
    limit = UP_FACTOR * max(1, state.up_base)
    target = wanted
    reasons: tuple[Reason, ...] = ()
    if wanted > max(limit, observation.target):
        target = max(limit, observation.target)
        text = f"{wanted} are wanted, {target} is twice what there was a cold start ago"
        reasons = (Reason(code=Code.LIMIT, text=text),)
    target, bound = _bounded(target, policy)
    if target > observation.target:
        state = replace(state, changed_at=now)
    return Decision(target=target, reasons=reasons + bound, state=state)


def _down(
    observation: Observation, state: State, policy: Policy, silence: Reason | None, now: float
) -> Decision:
    """One fewer, if that would have been enough for long enough."""
    current = observation.target
    left = current - 1
    if left < policy.min_replicas:
        reasons = (Reason(code=Code.STEADY, text="as many as the minimum"),)
        return _hold(observation, state, policy, reasons)
    obstacle = silence or _obstacle(observation, state, policy, now)
    if obstacle is not None:
        return _hold(observation, state, policy, (obstacle,))
    target, bound = _bounded(left, policy)
    less = Reason(code=Code.LESS, text=f"{left} would have been enough all the time")
    return Decision(target=target, reasons=(less, *bound), state=replace(state, changed_at=now))


def _obstacle(observation: Observation, state: State, policy: Policy, now: float) -> Reason | None:
    left = observation.target - 1
    if observation.starting:
        return Reason(code=Code.STARTING, text=f"{observation.starting} still to start: not fewer now")
    cold_start_s = _cold_start_s(state, policy)
    delay_s = policy.down_delay_s(cold_start_s) if left else policy.zero_delay_s(cold_start_s)
    peak = max((peak.load for peak in state.peaks if now - peak.at <= delay_s), default=math.inf)
    if peak > policy.downscale_margin * left:
        text = f"{peak:.2f} were needed within {delay_s:.0f} s: {left} would be too close"
        return Reason(code=Code.STEADY, text=text)
    calm_s = now - (now if state.calm_since is None else state.calm_since)
    if calm_s < delay_s:
        text = f"{left} would do; calm for {calm_s:.0f} s of {delay_s:.0f} s"
        return Reason(code=Code.WAIT, text=text)
    # The effect of one that went must have shown before the next one goes.
    settle_s = min(SHORT_S, delay_s)
    if state.changed_at is not None and now - state.changed_at < settle_s:
        text = f"{left} would do; the last change is {now - state.changed_at:.0f} s old"
        return Reason(code=Code.WAIT, text=text)
    return None
