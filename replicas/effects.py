"""Effects: what a replica's shell must do: commands for the engine, frames for routers."""

from dataclasses import dataclass, field

from replicas.api import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """For the engine: start this request. Never given twice for one (owner, request id, attempt)."""

    owner: str
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """For the engine: drop all sequences of this request, or one. They may have ended there already."""

    owner: str
    request_id: int
    attempt: int
    index: int | None = None
    """Output index; None = all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawRequest:
    """For the engine: drop this request if it has not started, and finish its outputs with `abort`."""

    owner: str
    request_id: int
    attempt: int
    indexes: tuple[int, ...]


EngineCommand = AddRequest | AbortRequest | WithdrawRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Frames for one open subscription, in order; `ended` closes it after them."""

    subscription: int
    frames: list[bytes]
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What the shell must do now, in order."""

    commands: list[EngineCommand] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
