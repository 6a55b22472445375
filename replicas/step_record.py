"""What a replica tells those who watch its steps: the second contract that crosses the wire.

All structs are msgpack and positional; the live page reads the same arrays as JSON. Times are seconds unless
the name says otherwise.
"""

import msgspec


class StepWatch(msgspec.Struct, frozen=True, array_like=True):
    """Ask what the steps of a replica did. Steps are recorded only while somebody goes on asking."""

    after: int = 0
    """StepNews.cursor of the last answer; 0 at first."""


class Rider(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence as it takes its seat."""

    seat: int
    """0, 1, ...; kept until the sequence ends or is preempted."""
    key: int
    """Unique within the replica's epoch; the same again after a preemption."""
    tier: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """Generated so far: > 0 for one that comes back, or was here before anybody watched."""
    max_output_tokens: int
    num_preemptions: int
    waited_ms: int
    """From its arrival at its router until now."""
    trace_id: str


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens that a step computed for a seat. Other seats with a rider decode."""

    seat: int
    num_tokens: int
    num_left: int
    """Still to be computed before it decodes: 0 in its last chunk."""


class Departure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rider that left its seat."""

    seat: int
    reason: str
    """A FinishReason, or `preempted`."""
    num_output_tokens: int


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One engine step. Its size grows with what changed, not with the batch."""

    number: int
    """Of the step; ascending, with gaps where steps were not recorded."""
    at: float
    """Wall-clock seconds when it ended."""
    step_ms: float
    num_waiting: int
    num_used_blocks: int
    overloaded: bool
    left: tuple[Departure, ...] = ()
    """Those who had lost their seats before the step: preempted, aborted, or ended in one not recorded."""
    started: tuple[Rider, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    idle: tuple[int, ...] = ()
    """Seats whose riders the step left out, or computed for nothing (static batching)."""
    finished: tuple[Departure, ...] = ()
    """Those who end with this step."""


class StepNews(msgspec.Struct, frozen=True, array_like=True):
    """What a StepWatch brings."""

    cursor: int
    """For the next StepWatch."""
    records: tuple[StepRecord, ...] = ()
    """Oldest first."""
    riders: tuple[Rider, ...] | None = None
    """Who sits where before the records; None = as after the last answer."""
