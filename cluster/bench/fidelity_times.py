"""What `headway bench fidelity` takes from real replicas: times of requests, and a profile of their steps."""

from dataclasses import dataclass, field

from cluster.simulation.profile import Profile


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds, one of each per request, and all gaps."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run in real time."""

    times: Times
    profile: Profile
    """Fitted to the steps of this run."""
    delay_s: float
    """Of a lone request, outside of the engine's steps: what the simulator's times lack."""
    facts: dict[str, object]
    """For the report."""
