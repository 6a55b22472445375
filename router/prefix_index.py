"""PrefixIndex: which prompt beginnings a replica probably still has in its cache. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

STRIDE_TOKENS: Final = 64
"""Prefixes are known at multiples of this: finer than replicas cache them would cost time for nothing."""


def prefix_hashes(token_ids: Sequence[int], salt: str) -> list[int]:
    """Return one chained hash per whole stride of the prompt. O(tokens), about 1 us per stride.

    Python's own hash: it differs between processes when salted by a string, and never leaves this one. A
    collision costs a wrong guess of what is cached, nothing else.
    """
    chained = hash(salt)
    hashes = []
    for end in range(STRIDE_TOKENS, len(token_ids) + 1, STRIDE_TOKENS):
        chained = hash((chained, tuple(token_ids[end - STRIDE_TOKENS : end])))
        hashes.append(chained)
    return hashes


class PrefixIndex:
    """This router's view of one replica's prefix cache: what it sent there lately.

    Noted at dispatch, not when it has been computed: twins that arrive together then find each other.
    Least recently used prefixes are forgotten beyond the replica's own capacity, so the view ages as the
    cache does. What other routers send is unknown here, so the view is an optimistic one.
    """

    def __init__(self, max_entries: int) -> None:
        """`max_entries`: strides that fit into the replica's KV pool."""
        self._max_entries = max_entries
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, hashes: Iterable[int]) -> int:
        """Return how many leading strides are known."""
        count = 0
        for value in hashes:
            if value not in self._seen:
                break
            count += 1
        return count

    def note(self, hashes: Sequence[int]) -> None:
        """Remember a prompt that was sent. Its end is forgotten before its beginning."""
        for value in reversed(hashes):
            self._seen[value] = None
            self._seen.move_to_end(value)
        while len(self._seen) > self._max_entries:
            self._seen.popitem(last=False)
