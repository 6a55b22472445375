"""Credits: how much each router may submit to this replica, so that requests wait in the routers. Pure.

A request that waits here can no longer be overtaken elsewhere, so routers are granted only what can start
soon: free seats and the look-ahead, split by what each router says it has queued. Seats and blocks of
worse tiers count as free where the engine may take them.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from replicas.api import GenerateRequest, ReplicaLoad, TierCredit, TierDemand

LOOK_AHEAD_SHARE: Final = 8
"""One waiting request per so many seats: the next step fills a seat that becomes free, instead of the
step after the router has heard of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What credits are drawn on."""

    max_num_seqs: int
    block_size: int
    takes_seats: bool = True
    """A better tier may take seats and blocks from running sequences of a worse one."""
    look_ahead: int | None = None
    """Requests that may wait beyond the seats; None = an eighth of the seats."""

    @property
    def max_open(self) -> int:
        """Outputs that may be here, waiting ones included."""
        ahead = self.look_ahead
        return self.max_num_seqs + (-(-self.max_num_seqs // LOOK_AHEAD_SHARE) if ahead is None else ahead)


@dataclass(slots=True)
class Account:
    """One router epoch's books; by tier."""

    demand: Counter[int] = field(default_factory=Counter)
    num_open: Counter[int] = field(default_factory=Counter)
    """Outputs that have not finished."""
    num_submitted: Counter[int] = field(default_factory=Counter)
    """Outputs of all submits applied in this epoch, whatever became of them: the router counts the same."""
    submitted_blocks: Counter[int] = field(default_factory=Counter)

    def declare(self, demand: Iterable[TierDemand]) -> None:
        """Take the router's word for what it has queued."""
        self.demand = Counter({entry.tier: entry.num_outputs for entry in demand})


class CreditBook:
    """Splits a replica's room among its router epochs. O(tiers * routers) per grant."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._load = ReplicaLoad()
        self._tiers = {0}
        self._unreported: Counter[int] = Counter()  # blocks of submits since the last report, by tier
        self._overlapping: Counter[int] = Counter()  # of the period before it: perhaps not in it either

    def submitted(self, account: Account, request: GenerateRequest) -> None:
        """Count a submit command that was applied."""
        blocks = request.num_blocks(self._capacity.block_size)
        self._tiers.add(request.tier)
        account.num_submitted[request.tier] += request.num_outputs
        account.submitted_blocks[request.tier] += blocks
        self._unreported[request.tier] += blocks

    def report(self, load: ReplicaLoad) -> None:
        """Take the engine's state after a step. Submits that came during the step are not in it."""
        self._load = load
        self._overlapping, self._unreported = self._unreported, Counter()

    def grant(self, account: Account, accounts: Collection[Account]) -> tuple[TierCredit, ...]:
        """Return what the router of `account` may have submitted in all, `accounts` being everybody."""
        tiers = {0, *account.num_submitted, *(tier for other in accounts for tier in other.num_open)}
        return tuple(self._tier_credit(tier, account, accounts) for tier in sorted(tiers))

    def free_seats(self, accounts: Collection[Account]) -> dict[int, int]:
        """Return the seats that are free, or may be taken, by tier: all that were ever seen here, and 0."""
        look_ahead = self._capacity.max_open - self._capacity.max_num_seqs
        return {tier: max(0, self._free_outputs(tier, accounts) - look_ahead) for tier in self._tiers}

    def _tier_credit(self, tier: int, account: Account, everybody: Collection[Account]) -> TierCredit:
        own = 1 + _through(tier, account.demand)
        total = sum(1 + _through(tier, other.demand) for other in everybody)
        return TierCredit(
            tier,
            _through(tier, account.num_submitted) + _share(self._free_outputs(tier, everybody), own, total),
            _through(tier, account.submitted_blocks) + _share(self._free_blocks(tier), own, total),
        )

    def _free_outputs(self, tier: int, everybody: Collection[Account]) -> int:
        if self._capacity.takes_seats:
            taken = sum(_through(tier, account.num_open) for account in everybody)
        else:
            taken = sum(account.num_open.total() for account in everybody)
        return self._capacity.max_open - taken

    def _free_blocks(self, tier: int) -> int:
        free = self._load.free_blocks - _through(tier, self._unreported) - _through(tier, self._overlapping)
        for load in self._load.tiers:
            if load.tier <= tier:
                free -= load.waiting_blocks
            elif self._capacity.takes_seats:
                free += load.held_blocks
        return free


def _through(tier: int, by_tier: Counter[int]) -> int:
    """Sum over this tier and the better ones. A plain loop: it runs several times per router and step."""
    total = 0
    for other, amount in by_tier.items():
        if other <= tier:
            total += amount
    return total


def _share(free: int, own: int, total: int) -> int:
    """Rounded up, so that the last seat is not withheld from everybody."""
    return -(-max(0, free) * own // total)
