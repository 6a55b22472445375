"""Options of `simulate` and `plan` that say what comes and what serves it."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cluster.config import ClusterConfig, load_config
from cluster.simulation.profile import Profile, load_profile
from cluster.simulation.traffic import Arrival, Mix, drawn, replay
from load.errors import LoadError, TraceError
from load.trace import Trace, cut, read_trace
from replicas.errors import ConfigError
from router.tenants import Tier

DEFAULT_SHARES: Final = (0.6, 0.3, 0.1)
"""Of the clients, best tier first; further tiers get nothing."""
DEFAULT_CV: Final = 1.14
"""Of the gaps between arrivals: what the m-large clients of ServeGen make together."""


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both commands ask for."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML of the application")
    parser.add_argument(
        "--trace", required=True, metavar="T", help="CSV of requests, or a bundled trace's name"
    )
    parser.add_argument("--profile", default="cpu", help="cpu, h200-8b, or a JSON file (default cpu)")
    parser.add_argument(
        "--cv", type=float, default=DEFAULT_CV, help="of the gaps of drawn arrivals (default 1.14)"
    )
    parser.add_argument(
        "--tier-shares", metavar="NAME=SHARE,...", help="of the clients, by tier (default 60, 30, 10%%)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a page with charts")


def configured(args: argparse.Namespace) -> ClusterConfig:
    """Return the configuration, or the default one. Raises ConfigError."""
    return load_config(args.config) if args.config else ClusterConfig()


def profile_of(args: argparse.Namespace) -> Profile:
    """Return the profile, with another cold start if that was asked for. Raises ConfigError."""
    profile = load_profile(args.profile)
    cold_start_s = getattr(args, "cold_start", None)
    if cold_start_s is None:
        return profile
    return msgspec.structs.replace(profile, cold_start_s=cold_start_s)


def trace_of(args: argparse.Namespace, seconds: float | None) -> Trace:
    """Read the trace, at most `seconds` of it. Raises ConfigError."""
    try:
        trace = read_trace(args.trace)
        return trace if seconds is None else cut(trace, duration_s=seconds, max_total_tokens=None)
    except (LoadError, TraceError) as error:
        raise ConfigError(str(error)) from None


def mix_of(args: argparse.Namespace, config: ClusterConfig, max_tokens: int, seed: int) -> Mix:
    """Return who sends the requests. Raises ConfigError."""
    return Mix(shares=_shares(args.tier_shares, config.tiers), max_tokens=max_tokens, seed=seed)


def arrivals_of(
    args: argparse.Namespace, trace: Trace, mix: Mix, rate: float | None, seconds: float
) -> Iterator[Arrival]:
    """Replay the trace, or draw from it where a rate is given."""
    if rate is not None:
        return drawn(trace, mix, lambda _: rate, seconds, args.cv)
    if not trace.has_arrivals:
        raise ConfigError(f"{trace.name} has no column arrival_s: give a --rate")
    return replay(trace, mix)


def _shares(text: str | None, tiers: tuple[Tier, ...]) -> dict[int, float]:
    if text is None:
        ordered = sorted(tier.level for tier in tiers)
        return dict(zip(ordered, DEFAULT_SHARES if len(ordered) > 1 else (1.0,), strict=False))
    levels = {tier.name: tier.level for tier in tiers}
    shares: dict[int, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            shares[levels[name.strip()]] = float(share)
        except (KeyError, ValueError):
            known = ", ".join(levels)
            raise ConfigError(f"--tier-shares: {part!r} is not TIER=SHARE; tiers: {known}") from None
    if min(shares.values()) < 0 or not 0 < sum(shares.values()) < float("inf"):
        raise ConfigError(f"--tier-shares: {text!r} must be positive numbers")
    return shares
