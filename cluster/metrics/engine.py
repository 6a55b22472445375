"""A replica's figures as samples."""

from collections.abc import Callable, Iterator, Mapping

from cluster.metrics import catalogue as c
from cluster.metrics.catalogue import Sample, histogram_sample
from replicas.api import TierLoad
from replicas.engine import StepReport
from replicas.pump import EnginePump
from router.histogram import COUNT_EDGES, ITL_EDGES_MS, Histogram


class StepMeasures:
    """What the engine tells of its steps, counted. Written by the engine's thread alone."""

    def __init__(self) -> None:
        self.step_ms = Histogram(ITL_EDGES_MS)
        self.itl_ms = Histogram(ITL_EDGES_MS)
        self.chunk_tokens = Histogram(COUNT_EDGES)
        self.batch_sequences = Histogram(COUNT_EDGES)

    def note(self, step: StepReport) -> None:
        """Count a step. Two microseconds."""
        self.step_ms.observe(step.step_s * 1e3)
        self.batch_sequences.observe(step.num_sequences)
        if step.gap_s is not None and step.num_decodes:
            self.itl_ms.observe(step.gap_s * 1e3, step.num_decodes)
        if step.num_prompt_tokens:
            self.chunk_tokens.observe(step.num_prompt_tokens)


class EngineFigures:
    """Where a replica's figures are kept."""

    def __init__(
        self, pump: EnginePump, tier_names: Mapping[int, str], device: str, clock: Callable[[], float]
    ) -> None:
        """Begins to watch the pump's engine; call before it starts. `clock` is monotonic, in seconds."""
        self._pump = pump
        self._tier_names = tier_names
        self._device = device
        self._clock = clock
        self._ready_at = clock()
        self._steps = StepMeasures()
        pump.engine.watch(self._steps.note)

    def samples(self) -> Iterator[Sample]:
        """Read them all, from any thread. O(tiers)."""
        steps, load, card = self._steps, self._pump.load, self._pump.card
        yield histogram_sample(c.STEP, steps.step_ms)
        yield histogram_sample(c.ENGINE_ITL, steps.itl_ms)
        yield histogram_sample(c.CHUNK, steps.chunk_tokens)
        yield histogram_sample(c.BATCH, steps.batch_sequences)
        yield from self._counters()
        present = {tier.tier: tier for tier in load.tiers}
        for level, name in self._tier_names.items():
            tier = present.get(level, TierLoad(level, 0, 0, 0))
            yield Sample(c.RUNNING, (name,), tier.num_running)
            yield Sample(c.WAITING, (name,), tier.num_waiting)
        yield Sample(c.SEATS, (), card.max_num_seqs)
        yield Sample(c.KV_BLOCKS, (), card.num_blocks)
        yield Sample(c.KV_USED, (), max(0, load.num_blocks - load.free_blocks))
        yield Sample(c.OVERLOADED, (), load.overloaded)
        yield Sample(c.REPLICA_S, (self._device,), self._clock() - self._ready_at)

    def _counters(self) -> Iterator[Sample]:
        counters = self._pump.engine.counters
        yield Sample(c.ENGINE_PROMPT, (), counters.prompt_tokens)
        yield Sample(c.ENGINE_CACHED, (), counters.cached_tokens)
        yield Sample(c.ENGINE_COMPUTED, (), counters.computed_tokens)
        yield Sample(c.ENGINE_OUTPUT, (), counters.output_tokens)
        yield Sample(c.ENGINE_DRAFTED, (), counters.draft_tokens)
        yield Sample(c.ENGINE_ACCEPTED, (), counters.accepted_tokens)
        yield Sample(c.ENGINE_ENDED, ("finished",), counters.finished)
        yield Sample(c.ENGINE_ENDED, ("failed",), counters.failed)
        yield Sample(c.ENGINE_ENDED, ("aborted",), counters.aborted)
        yield Sample(c.PREEMPTIONS, (), self._pump.engine.scheduler.num_preemptions)
        yield Sample(c.SCHEDULER_S, (), counters.scheduler_s)
        yield Sample(c.RUNNER_S, (), counters.runner_s)
