"""Reports as flat numbers and back: all that Serve carries from a replica to its autoscaler. Pure.

A name is a path of parts; `headway/replica/...` describes the replica itself, `headway/router/...` is
what a router told it. Where a deployment is not ours, its own names are mapped to a few of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cluster.autoscaling_needs import ReplicaReport
from replicas.api import ReplicaLoad
from replicas.capability import Capability
from router.counters import RouterCounters, TierCounters

REPLICA: Final = "headway/replica/"
ROUTER: Final = "headway/router/"
MAX_COUNT: Final = 2.0**53
"""Beyond it a float no longer counts."""
WORK_UNIT_S: Final = 1e-3
"""Work of other deployments is counted in so many seconds."""
NAMED: Final = ("work_s", "queued_work_s", "num_running", "max_running", "memory_used", "memory")
"""What another deployment may report: docs/autoscaling.md."""

Stats = Mapping[str, Mapping[str, float]]
"""By name, then by replica: the last value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """What was reported through a deployment's replicas."""

    routers: tuple[RouterCounters, ...]
    replicas: tuple[ReplicaReport, ...]


def replica_stats(
    load: ReplicaLoad, capability: Capability, block_size: int, cold_start_s: float
) -> dict[str, float]:
    """Return what a replica says of itself, as flat numbers."""
    waiting_blocks = sum(tier.waiting_blocks for tier in load.tiers)
    used_blocks = load.num_blocks - load.free_blocks
    stats = {
        "input_tokens_per_s": capability.input_tokens_per_s,
        "output_tokens_per_s": capability.output_tokens_per_s,
        "max_batch": float(capability.max_batch),
        "step_s": capability.step_s,
        "num_running": float(load.num_running),
        "kv_tokens": float(load.num_blocks * block_size),
        "kv_wanted_tokens": float((used_blocks + waiting_blocks) * block_size),
        "is_at_floor": float(load.overloaded),
        "cold_start_s": cold_start_s,
    }
    stats |= {f"queued_tokens/{tier.tier}": float(tier.queued_tokens) for tier in load.tiers}
    return {REPLICA + name: value for name, value in stats.items()}


def router_stats(counters: RouterCounters) -> dict[str, float]:
    """Return a router's counters as flat numbers; empty buckets are left out."""
    root = f"{ROUTER}{counters.router}/{counters.epoch}/"
    stats = {f"{root}number": float(counters.number)}
    for tier in counters.tiers:
        for name in TierCounters.__struct_fields__[1:]:
            value = getattr(tier, name)
            if isinstance(value, tuple):
                counts = {f"{name}/{place}": float(count) for place, count in enumerate(value) if count}
                stats |= {f"{root}{tier.tier}/{place}": count for place, count in counts.items()}
            else:
                stats[f"{root}{tier.tier}/{name}"] = float(value)
    return stats


def read(stats: Stats) -> Reports:
    """Undo both, for all replicas. Names that are not ours are skipped, and values that count nothing."""
    replicas: dict[str, dict[str, float]] = {}
    routers: dict[tuple[str, str], dict[str, float]] = {}
    for name, values in stats.items():
        for replica, value in values.items():
            if name.startswith(REPLICA):
                replicas.setdefault(replica, {})[name.removeprefix(REPLICA)] = value
            elif name.startswith(ROUTER):
                router, _, rest = name.removeprefix(ROUTER).partition("/")
                routers.setdefault((replica, router), {})[rest] = value
    found = (_router(router, values) for (_, router), values in routers.items())
    return Reports(
        routers=tuple(counters for counters in found if counters is not None),
        replicas=tuple(_replica(replica, values) for replica, values in replicas.items()),
    )


def read_named(stats: Stats, names: Mapping[str, str], tier: int, at: Mapping[str, float]) -> Reports:
    """The same for a deployment that reports NAMED figures under names of its own; `at` is when each
    replica did.

    Every replica counts for itself, so it is its own router here. Its work is in seconds already.
    """
    reports, routers = [], []
    for replica in sorted(at):
        given = dict.fromkeys(NAMED, 0.0)
        given |= {key: stats.get(name, {}).get(replica, 0.0) for key, name in names.items()}
        reports.append(
            ReplicaReport(
                replica=replica,
                input_tokens_per_s=1 / WORK_UNIT_S,
                max_batch=given["max_running"],
                num_running=given["num_running"],
                kv_tokens=given["memory"],
                kv_wanted_tokens=given["memory_used"],
            )
        )
        work, queued = given["work_s"] / WORK_UNIT_S, given["queued_work_s"] / WORK_UNIT_S
        if 0 <= work < MAX_COUNT and 0 <= queued < MAX_COUNT:
            counters = TierCounters(tier, input_tokens=round(work), queued_input_tokens=round(queued))
            routers.append(RouterCounters(replica, 1, round(at[replica] * 1e3), (counters,)))
    return Reports(routers=tuple(routers), replicas=tuple(reports))


def _replica(replica: str, values: Mapping[str, float]) -> ReplicaReport:
    numbers = {name: value for name, value in values.items() if "/" not in name}
    at_floor = numbers.pop("is_at_floor", 0.0) > 0
    queued = {
        int(name.removeprefix("queued_tokens/")): value
        for name, value in values.items()
        if name.startswith("queued_tokens/")
    }
    return ReplicaReport(replica=replica, is_at_floor=at_floor, queued_tokens=queued, **numbers)


def _router(router: str, values: Mapping[str, float]) -> RouterCounters | None:
    """The counters of the router's latest epoch; None if they are no numbers."""
    epoch = max(int(name.partition("/")[0]) for name in values)
    number = 0
    tiers: dict[int, dict[str, int]] = {}
    for name, value in values.items():
        of, _, rest = name.partition("/")
        if int(of) != epoch:
            continue
        if not 0 <= value < MAX_COUNT:
            return None
        tier, _, field = rest.partition("/")
        if field:
            tiers.setdefault(int(tier), {})[field] = int(value)
        else:
            number = int(value)
    return RouterCounters(router, epoch, number, tuple(_tier(*tier) for tier in sorted(tiers.items())))


def _tier(tier: int, values: Mapping[str, int]) -> TierCounters:
    plain = {name: value for name, value in values.items() if "/" not in name}
    return TierCounters(tier, **plain, ttft=_buckets("ttft/", values), itl=_buckets("itl/", values))


def _buckets(prefix: str, values: Mapping[str, int]) -> tuple[int, ...]:
    counts = {int(name.removeprefix(prefix)): n for name, n in values.items() if name.startswith(prefix)}
    return tuple(counts.get(place, 0) for place in range(max(counts, default=-1) + 1))
