"""What the HTTP side of a router needs from the side that talks to replicas."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from replicas.api import ModelCard, SamplingParams, TokenDelta
from router.errors import ApiError


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """When the present attempt began to wait and was sent; event loop's clock, None = not yet."""

    queued_at: float | None = None
    sent_at: float | None = None


class Generation(Protocol):
    """One request in flight: an asynchronous iterator of deltas, all outputs interleaved.

    Every output index asked for ends in exactly one delta with a finish_reason, unless it is aborted;
    iteration stops after the last of them. A replica that dies is such a delta too (`error`). Iteration
    never raises.
    """

    @property
    def times(self) -> GenerationTimes: ...

    @property
    def refusal(self) -> ApiError | None:
        """Set when the request was refused although it had been accepted; its outputs end with an error."""
        ...

    @property
    def queue_wait_s(self) -> float | None:
        """How long it waited in this router until it was first sent to a replica; None = it still does."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    def abort(self, index: int | None = None) -> None:
        """End the request now, or one output of it, on the replica too: nothing more of it comes.

        Iteration stops when no output is left. Idempotent, callable at any time.
        """
        ...


class Backend(Protocol):
    """Starts generations somewhere. Implemented over replicas, and by fakes in tests."""

    @property
    def card(self) -> ModelCard | None:
        """The served model as the replicas describe it; None while no replica can serve."""
        ...

    def generate(
        self,
        *,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        n: int = 1,
        tier: int = 0,
        cache_salt: str = "",
        trace_id: str = "",
        traceparent: str = "",
        tenant: str = "",
        weight: float = 1.0,
    ) -> Generation:
        """Start a request; returns at once. `weight` is the tenant's share of the service in its tier.

        Raises NoReplicaError when nothing can serve it, ApiError when it would have to wait too long.
        """
        ...
