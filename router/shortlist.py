"""Shortlist: which replicas are compared for a request, however many there are. Pure."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Final, TypeVar

MAX_COMPARED: Final = 16
"""The best of so many is in the best fifth of any fleet with 97%."""
MAX_OWNED: Final = 500_000
"""Strides of which a router remembers the replica: some 50 MB."""

Replica = TypeVar("Replica")


class PrefixOwners:
    """Which replica was last sent a prompt with this beginning: finds it without asking all of them."""

    def __init__(self, max_entries: int = MAX_OWNED) -> None:
        self._max_entries = max_entries
        self._owners: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, hashes: Iterable[int]) -> str | None:
        """Return the owner of the longest known beginning, given router.prefix_index.prefix_hashes."""
        owner = None
        for value in hashes:
            found = self._owners.get(value)
            if found is None:
                break
            owner = found
        return owner

    def note(self, hashes: Sequence[int], replica: str) -> None:
        """Remember where a prompt was sent. Its end is forgotten before its beginning."""
        for value in reversed(hashes):
            self._owners[value] = replica
            self._owners.move_to_end(value)
        while len(self._owners) > self._max_entries:
            self._owners.popitem(last=False)

    def shortlist(
        self, replicas: Mapping[str, Replica], hashes: Iterable[int], draw: Random
    ) -> Collection[Replica]:
        """Return all of a small fleet; of a large one some at random, and the owner of the prompt's
        beginning: what a request costs then does not grow with the fleet."""
        if len(replicas) <= MAX_COMPARED:
            return replicas.values()
        some = draw.sample(list(replicas), MAX_COMPARED)
        owner = self.find(hashes)
        if owner is not None and owner in replicas and owner not in some:
            some.append(owner)
        return [replicas[name] for name in some]
