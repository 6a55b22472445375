"""FairQueue: whose request is next within one tier, by virtual token counters. Pure.

Source: Sheng et al., "Fairness in Serving Large Language Models" (VTC), OSDI'24, algorithms 2 and 3.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

INPUT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
"""What a token costs; an input token that came from a prefix cache costs nothing."""
MAX_IDLE_TENANTS: Final = 10_000
"""Counters kept of tenants without queued work. Those with the least service go first: a tenant that
comes back is lifted to the others anyway."""

Item = TypeVar("Item")


def service(num_input_tokens: int, num_output_tokens: int = 0) -> float:
    """What so many uncached tokens cost, for a tenant of weight 1."""
    return INPUT_WEIGHT * num_input_tokens + OUTPUT_WEIGHT * num_output_tokens


@dataclass(frozen=True, slots=True, order=True)
class _Rank:
    """A tenant's place: its counter, then the arrival of its oldest request."""

    counter: float
    ticket: int
    tenant: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Head(Generic[Item]):
    """The oldest request of a tenant."""

    tenant: str
    key: int
    item: Item


class FairQueue(Generic[Item]):
    """One FIFO per tenant; the tenant with the least service so far is next.

    Between two tenants that both have queued work all the time, weighted service differs by at most
    2 * max(input weight * longest prompt, output weight * tokens of a full batch) (theorem 4.4); with
    several routers, also by what the others served since the last exchange. A tenant that was idle
    starts level with the least served of the others: time away is no credit, and no debt is forgiven.

    Every operation is O(log tenants), amortised. A counter's change does not touch the heap: an entry
    is compared with the truth when it comes to the top.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._lines: dict[str, OrderedDict[int, tuple[int, Item]]] = {}  # tenant -> key -> ticket, item
        self._heap: list[_Rank] = []
        self._weights: dict[str, float] = {}  # of the tenants with queued requests
        self._sum_weights = 0.0
        self._ranks: dict[str, _Rank] = {}  # the one valid entry of each tenant in the heap
        self._next_ticket = 0
        self._floor = 0.0  # counter of the tenant served last
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[Item]:
        for line in self._lines.values():
            for _, item in line.values():
                yield item

    @property
    def tenants(self) -> set[str]:
        """Those with queued requests."""
        return set(self._lines)

    def counter(self, tenant: str) -> float:
        """Weighted service so far; 0 for a tenant never seen, or forgotten."""
        return self._counters.get(tenant, 0.0)

    def num_before(self, tenant: str, weight: float = 1.0) -> int:
        """Requests that probably go before a new one of this tenant: its own, and of each other tenant as
        many as its weight brings meanwhile, as if all had enough queued. O(1)."""
        own = len(self._lines.get(tenant, ()))
        other_weights = self._sum_weights - self._weights.get(tenant, 0.0)
        return min(self._num_items, own + round((own + 1) * other_weights / weight))

    def push(self, tenant: str, key: int, item: Item, weight: float = 1.0) -> None:
        """Queue `item` behind the others of its tenant. `key` must not be queued already."""
        self._sum_weights += weight - self._weights.get(tenant, 0.0)
        self._weights[tenant] = weight
        ticket = self._next_ticket
        self._next_ticket += 1
        line = self._lines.get(tenant)
        if line is None:
            self._lift(tenant)
            line = self._lines[tenant] = OrderedDict()
            line[key] = (ticket, item)
            self._enter(tenant)
        else:
            line[key] = (ticket, item)
        self._num_items += 1

    def remove(self, tenant: str, key: int) -> Item | None:
        """Take a request out, to be served or because nobody wants it any more; None if unknown."""
        line = self._lines.get(tenant)
        entry = line.pop(key, None) if line is not None else None
        if line is None or entry is None:
            return None
        self._num_items -= 1
        if not line:
            self._floor = self.counter(tenant)
            del self._lines[tenant], self._ranks[tenant]
            self._sum_weights -= self._weights.pop(tenant)
            self._forget_idle()
        return entry[1]

    def head(self, excluded: Collection[str] = ()) -> Head[Item] | None:
        """The request that is next, of a tenant not among `excluded`."""
        aside = []
        found = None
        while self._settle_top():
            rank = self._heap[0]
            if rank.tenant not in excluded:
                key, (_, item) = next(iter(self._lines[rank.tenant].items()))
                found = Head(rank.tenant, key, item)
                break
            aside.append(heapq.heappop(self._heap))
        for rank in aside:
            heapq.heappush(self._heap, rank)
        return found

    def charge(self, tenant: str, amount: float, weight: float = 1.0) -> None:
        """Add service to a tenant's counter, divided by its weight; negative = a refund."""
        before = self._counters.get(tenant, 0.0)
        self._counters[tenant] = max(0.0, before + amount / weight)
        if amount < 0 and tenant in self._lines:
            self._enter(tenant)  # an entry that is too high would not come to the top in time

    def _lift(self, tenant: str) -> None:
        lowest = self.counter(self._heap[0].tenant) if self._settle_top() else self._floor
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)

    def _enter(self, tenant: str) -> None:
        ticket, _ = next(iter(self._lines[tenant].values()))
        rank = self._ranks[tenant] = _Rank(self.counter(tenant), ticket, tenant)
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)

    def _settle_top(self) -> bool:
        """Bring the heap's top up to date; False if nothing is queued."""
        while self._heap:
            rank = self._heap[0]
            if self._ranks.get(rank.tenant) is not rank:
                heapq.heappop(self._heap)
                continue
            ticket, _ = next(iter(self._lines[rank.tenant].values()))
            if rank.counter == self.counter(rank.tenant) and rank.ticket == ticket:
                return True
            heapq.heappop(self._heap)
            self._enter(rank.tenant)
        return False

    def _forget_idle(self) -> None:
        num_idle = len(self._counters) - len(self._lines)
        if num_idle <= MAX_IDLE_TENANTS:
            return
        idle = sorted((t for t in self._counters if t not in self._lines), key=self.counter)
        for tenant in idle[: num_idle - MAX_IDLE_TENANTS // 2]:
            del self._counters[tenant]
