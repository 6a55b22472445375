"""TracedRequests: the times of requests whose sender traces them. Costs nothing for the others."""

from collections.abc import Callable
from dataclasses import dataclass

from replicas.api import GenerateRequest
from replicas.scheduler import Outputs


@dataclass(slots=True)
class EngineTrace:
    """A request's way through an engine. Times are of the engine's clock, in seconds."""

    traceparent: str
    """W3C trace context of the span that asked for it."""
    added_at: float
    num_prompt_tokens: int
    num_open: int
    """Outputs without a finish."""
    first_at: float | None = None
    """When its first token was out."""
    ended_at: float = 0.0
    num_output_tokens: int = 0
    how: str = ""
    """Finish reason of its last output."""


class TracedRequests:
    """Follows them from when they are added until they end. For the engine's thread."""

    def __init__(self, sink: Callable[[EngineTrace], None]) -> None:
        """`sink` gets each one that has ended, and returns at once."""
        self._sink = sink
        self._open: dict[tuple[str, int], EngineTrace] = {}

    def added(self, owner: str, request: GenerateRequest, now: float) -> None:
        """A request was queued; ignored if it is not traced."""
        if request.traceparent:
            num_prompt, num_open = len(request.prompt_ids), len(request.indexes)
            trace = EngineTrace(request.traceparent, now, num_prompt, num_open)
            self._open[owner, request.request_id] = trace

    def stepped(self, outputs: Outputs, now: float) -> None:
        """A step has ended. O(its deltas) while something is traced."""
        if not self._open:
            return
        for owner, deltas in outputs.items():
            for delta in deltas:
                trace = self._open.get((owner, delta.request_id))
                if trace is None:
                    continue
                if delta.token_ids and trace.first_at is None:
                    trace.first_at = now
                trace.num_output_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._finished(owner, delta.request_id, delta.finish_reason, now)

    def aborted(self, owner: str, request_id: int, index: int | None, now: float) -> None:
        """A request, or one output of it, was ended from outside."""
        trace = self._open.get((owner, request_id))
        if trace is not None:
            trace.num_open = trace.num_open if index is not None else 1
            self._finished(owner, request_id, "abort", now)

    def _finished(self, owner: str, request_id: int, how: str, now: float) -> None:
        trace = self._open[owner, request_id]
        trace.num_open -= 1
        if not trace.num_open:
            trace.ended_at, trace.how = now, how
            del self._open[owner, request_id]
            self._sink(trace)
