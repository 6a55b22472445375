"""Engine: the loop's body. Schedules, runs, takes over, learns how long it took."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replicas.api import FinishReason, GenerateRequest, ReplicaLoad, SamplingParams, TokenDelta
from replicas.capability import Capability, capability
from replicas.config import ResolvedConfig
from replicas.credits import Capacity
from replicas.errors import PromptTooLongError, RequestError
from replicas.overlap import Launcher, Overlap
from replicas.scheduler import Outputs, Scheduler
from replicas.step import Runner, Step, StepResult
from replicas.step_time import StepTimeModel

MIN_STALL_S = 10.0
STALL_STEPS = 20
"""A replica with work is stuck when a step takes longer than max(10 s, 20 x q99 of recent steps)."""
PREFILL_RATE_GAIN = 0.1
"""Weight of the last step with prompts in the reported prefill rate."""
NUM_LATEST_STEPS = 3
"""Steps whose median is reported: one alone may have been held up, by the machine or by a frozen process."""
MAX_FAILED_STEPS = 3
"""So many steps in a row in which every sequence failed: the runner is broken, not the requests."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that were accepted."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation included."""
    output_tokens: int = 0
    draft_tokens: int = 0
    """Guesses that were computed; counted among the computed tokens."""
    accepted_tokens: int = 0
    """Guesses that were right."""
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    scheduler_s: float = 0.0
    runner_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step as those see it who measure the engine."""

    step_s: float
    """Scheduling and bookkeeping included."""
    gap_s: float | None
    """Since the step before ended: the gap that its decodes saw. None after idle time."""
    num_sequences: int
    num_decodes: int
    num_prompt_tokens: int
    """Computed for prompts and for sequences that were preempted."""


def _nothing(_: SamplingParams) -> None:
    return


class Engine:
    """One scheduler and one runner, driven step by step by a single thread.

    A request can never end the loop: what one sequence breaks is that sequence's error. When a runner
    raises, the step is run again in halves until the culprit stands alone (steps are idempotent).
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        prepare: Callable[[SamplingParams], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prepare` hears of every accepted request and must return at once."""
        self.step_time = StepTimeModel()
        self.scheduler = Scheduler(config, eos_token_ids, self.step_time)
        self.counters = EngineCounters()
        self._config = config
        self._overlap = Overlap(runner, self.scheduler.look_ahead) if isinstance(runner, Launcher) else None
        self._runner = self._overlap or runner
        self._prepare = prepare
        self._vocab_size = vocab_size
        self._clock = clock
        self._observers: list[Callable[[StepReport], None]] = []
        self.last_step: Step | None = None
        """What the last call of `step` ran; None = nothing."""
        self._step_started_at: float | None = None
        self._step_ended_at: float | None = None
        self._learning_s = 0.0
        """What the last step took after its end, mostly for a refit: the next gap has it."""
        self._latest_steps_s: deque[float] = deque(maxlen=NUM_LATEST_STEPS)
        self._prefill_tokens_per_s = 0.0
        self._slowest_recent_s = 0.0
        self._failed_steps = 0

    def watch(self, observer: Callable[[StepReport], None]) -> None:
        """Tell `observer` of every step from now on, in the thread that steps. It must return at once."""
        self._observers.append(observer)

    @property
    def capacity(self) -> Capacity:
        """What routers may be granted of this engine."""
        config = self._config
        is_continuous = config.batching == "continuous"
        return Capacity(
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            takes_seats=config.takes_seats,
            # A static batch starts as a whole: its successor must be here when it ends.
            look_ahead=None if is_continuous else config.max_num_seqs,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: GenerateRequest, owner: str) -> None:
        """Queue a request. Raises RequestError if it can never run here."""
        self._check(request)
        self._prepare(request.sampling)
        self.scheduler.add(request, owner, self._clock())
        self.counters.prompt_tokens += len(request.prompt_ids)

    def abort(self, owner: str, request_id: int, index: int | None = None) -> None:
        """End a request, or one output, without a delta. Unknown ones are ignored: they may have finished."""
        if self.scheduler.abort(owner, request_id, self._clock(), index):
            self.counters.aborted += 1

    def withdraw(self, owner: str, request_id: int) -> bool:
        """End a request without a delta if nothing of it has run. False if it has, or is unknown."""
        return self.scheduler.withdraw(owner, request_id, self._clock())

    def step(self) -> Outputs:
        """Run one step; returns the deltas by owner. Empty when there was nothing to run."""
        started_at = self._step_started_at = self._clock()
        self.last_step = None
        try:
            ahead = self._overlap.ahead if self._overlap is not None else None
            step = ahead or self.scheduler.schedule(started_at)
            if not step.sequences:
                return {}
            scheduled_at = self._clock()
            result = self._execute(step)
            executed_at = self._clock()
            outputs = self.scheduler.update(step, result, executed_at)
            ended_at = self._clock()
        finally:
            self._step_started_at = None
        self.last_step = step
        self._count(step, result, outputs)
        self.counters.scheduler_s += (scheduled_at - started_at) + (ended_at - executed_at)
        self.counters.runner_s += executed_at - scheduled_at
        # The whole step counts, scheduling included: that is the gap a stream sees.
        step_s = ended_at - started_at
        self._latest_steps_s.append(step_s)
        self._slowest_recent_s = max(step_s, 0.999 * self._slowest_recent_s)
        if not result.errors:
            self.step_time.observe(step.shape, step_s + self._learning_s)
        self._learning_s = self._clock() - ended_at
        self._report(step, step_s, ended_at)
        if step.num_prefill_tokens and step_s > 0:
            rate = step.num_prefill_tokens / step_s
            old = self._prefill_tokens_per_s or rate
            self._prefill_tokens_per_s = old + PREFILL_RATE_GAIN * (rate - old)
        return outputs

    def _report(self, step: Step, step_s: float, ended_at: float) -> None:
        before_at = self._step_ended_at
        self._step_ended_at = ended_at if self.has_work else None
        report = StepReport(
            step_s=step_s,
            gap_s=None if before_at is None else ended_at - before_at,
            num_sequences=len(step.sequences),
            num_decodes=step.num_decodes,
            num_prompt_tokens=step.num_prefill_tokens,
        )
        for observer in self._observers:
            observer(report)

    def load(self) -> ReplicaLoad:
        step_s = statistics.median(self._latest_steps_s) if self._latest_steps_s else 0.0
        return self.scheduler.load(step_s * 1e3, self._prefill_tokens_per_s)

    def capability(self, load: ReplicaLoad) -> Capability:
        """How much work this engine can take, its sequences being as long as those of `load`. Callable from
        any thread."""
        used_tokens = (load.num_blocks - load.free_blocks) * self._config.block_size
        return capability(self._config, self.step_time, used_tokens / max(1, load.num_running))

    def kv_utilisation(self) -> float:
        """Live tokens / slots of allocated blocks, now; 1.0 when nothing is allocated.

        Prefix blocks held by several sequences count once on both sides only if nothing is shared;
        with sharing the figure may exceed 1.
        """
        allocated = self._config.num_blocks - self.scheduler.cache.num_free_blocks
        if not allocated:
            return 1.0
        return self.scheduler.live_tokens() / (allocated * self._config.block_size)

    def stall_reason(self, now: float) -> str | None:
        """Why this engine should be restarted; None while it is well. Callable from any thread."""
        if self._failed_steps >= MAX_FAILED_STEPS:
            return f"{self._failed_steps} steps in a row failed for every sequence"
        started_at = self._step_started_at
        limit_s = max(MIN_STALL_S, STALL_STEPS * self._slowest_recent_s)
        if started_at is not None and now - started_at > limit_s:
            return f"a step has been running for {now - started_at:.1f} s (limit {limit_s:.1f} s)"
        return None

    def _check(self, request: GenerateRequest) -> None:
        num_tokens = len(request.prompt_ids) + max(map(len, request.resumed_output_ids), default=0)
        if num_tokens >= self._config.max_model_len:
            raise PromptTooLongError(num_tokens, self._config.max_model_len)
        if not request.prompt_ids:
            raise RequestError("the prompt is empty")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self._vocab_size:
            raise RequestError(f"the prompt has a token id outside 0..{self._vocab_size - 1}")
        if request.resumed_output_ids and len(request.resumed_output_ids) != len(request.indexes):
            raise RequestError("resumed_output_ids must have one entry per output index")
        if not request.indexes or request.sampling.max_tokens < 1:
            raise RequestError("a request must ask for at least one output of at least one token")

    def _execute(self, step: Step) -> StepResult:
        """Run the step; if the runner raises, find the sequences it fails on and run the others."""
        try:
            return self._runner.execute(step)
        except Exception as error:
            if len(step.sequences) == 1:
                return StepResult(token_ids=[None], errors={0: f"{type(error).__name__}: {error}"[:300]})
        middle = len(step.sequences) // 2
        first = self._execute(_part(step, 0, middle))
        second = self._execute(_part(step, middle, len(step.sequences)))
        logprobs = None
        if first.logprobs is not None or second.logprobs is not None:
            logprobs = (first.logprobs or [None] * middle) + (
                second.logprobs or [None] * (len(step.sequences) - middle)
            )
        return StepResult(
            token_ids=first.token_ids + second.token_ids,
            logprobs=logprobs,
            prompt_logprobs=first.prompt_logprobs
            | {middle + position: entries for position, entries in second.prompt_logprobs.items()},
            verified=first.verified
            | {middle + position: entry for position, entry in second.verified.items()},
            errors=first.errors | {middle + position: text for position, text in second.errors.items()},
        )

    def _count(self, step: Step, result: StepResult, outputs: Outputs) -> None:
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += step.num_tokens
        counters.draft_tokens += step.num_drafts
        counters.accepted_tokens += sum(len(entry.token_ids) for entry in result.verified.values())
        failed = len(result.errors)
        self._failed_steps = self._failed_steps + 1 if failed == len(step.sequences) else 0
        counters.failed += failed
        for deltas in outputs.values():
            for delta in deltas:
                _count_delta(counters, delta)


def _count_delta(counters: EngineCounters, delta: TokenDelta) -> None:
    counters.output_tokens += len(delta.token_ids)
    counters.cached_tokens += delta.num_cached_tokens or 0
    if delta.finish_reason is not None and delta.finish_reason is not FinishReason.ERROR:
        counters.finished += 1


def _part(step: Step, low: int, high: int) -> Step:
    sequences = step.sequences[low:high]
    return Step(
        number=step.number,
        sequences=sequences,
        num_tokens=sum(entry.num_new_tokens for entry in sequences),
        num_decodes=max(0, min(step.num_decodes, high) - low),
        num_drafts=sum(len(entry.drafts) for entry in sequences),
    )
