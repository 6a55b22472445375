"""What a worker reports about each request, and about itself. Everything the measures are made of."""

from array import array

import msgspec

from load.answer import Answer, Failure
from load.plan import Script


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request, all attempts. Times in seconds from the start of the run."""

    script: int
    turn: int
    tenant: int
    due_s: float
    """When the plan wanted the first attempt sent."""
    first_sent_s: float
    """When it was."""
    sent_s: float
    """When the attempt that counts was sent: the last one."""
    done_s: float
    output_s: bytes
    """Instants of the events that brought output: float64, native order."""
    status: int
    attempts: int
    is_cancelled: bool
    """We hung up, as planned."""
    is_slow: bool
    """We read slowly, as planned: its gaps are ours."""
    failure: Failure | None
    detail: str
    asked_input_tokens: int
    asked_output_tokens: int
    finish_reason: str | None
    prompt_tokens: int | None
    """As the server's usage has it; None when it sent none."""
    output_tokens: int | None
    cached_tokens: int | None
    queue_wait_ms: float | None
    """As the server reports it in a header, if it does."""

    @property
    def output_at(self) -> "array[float]":
        return array("d", self.output_s)


def new_record(
    *, script: Script, turn_number: int, answer: Answer, attempts: int,
    due_at: float, first_sent_at: float, start_at: float,
) -> RequestRecord:  # fmt: skip
    """Close the books on a request. `*_at` are instants of the clock, `start_at` that of the run's start."""
    usage = answer.usage
    turn = script.turns[turn_number]
    system_tokens = sum(segment.num_tokens for segment in script.system)
    details = usage.prompt_tokens_details if usage is not None else None
    return RequestRecord(
        script=script.index,
        turn=turn_number,
        tenant=script.tenant,
        due_s=due_at - start_at,
        first_sent_s=first_sent_at - start_at,
        sent_s=answer.sent_at - start_at,
        done_s=answer.done_at - start_at,
        output_s=array("d", [at - start_at for at in answer.output_at]).tobytes(),
        status=answer.status,
        attempts=attempts,
        is_cancelled=answer.is_cancelled,
        is_slow=script.read_bytes_per_s > 0,
        failure=answer.failure,
        detail=answer.detail,
        asked_input_tokens=turn.input_tokens + system_tokens,
        asked_output_tokens=turn.output_tokens,
        finish_reason=answer.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        output_tokens=usage.completion_tokens if usage is not None else None,
        cached_tokens=details.cached_tokens if details is not None else None,
        queue_wait_ms=answer.queue_wait_ms,
    )


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Sent a few times per second by each worker."""

    worker: int
    started: int
    in_flight: int
    output_events: int
    records: list[RequestRecord]
    """Those that ended since the last message."""


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """A worker's last message."""

    worker: int
    cpu_s: float
    """User and system time of the driving loop, start-up excluded."""
    loop_lag_ms: list[float]
    """How late a timer fired, probed 20 times per second."""


class WorkerCrash(msgspec.Struct, frozen=True, kw_only=True, tag="crash"):
    """The worker itself failed: the run is void."""

    worker: int
    traceback: str


Report = Progress | WorkerEnd | WorkerCrash
"""What travels from a worker to the parent."""
