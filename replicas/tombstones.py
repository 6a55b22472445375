"""Tombstones: what is over and must stay over, remembered for a bounded time and in bounded space."""

from typing import Final, Generic, TypeVar

MAX_TOMBSTONES: Final = 8192
TOMBSTONE_S: Final = 60.0

Key = TypeVar("Key")


class Tombstones(Generic[Key]):
    """Per key the highest number that has ended: (request id -> attempt), (router id -> epoch).

    Messages older than `max_age_s` would be forgotten about; a carrier does not delay that long, and
    what such a message starts is ended by its sender's lease.
    """

    def __init__(self, *, max_entries: int = MAX_TOMBSTONES, max_age_s: float = TOMBSTONE_S) -> None:
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._ended: dict[Key, tuple[int, float]] = {}  # oldest first: re-inserted when raised

    def __len__(self) -> int:
        return len(self._ended)

    def bury(self, key: Key, number: int, now: float) -> None:
        """Remember that `number` and all below it have ended; drops the oldest entries beyond the bounds."""
        highest, _ = self._ended.pop(key, (number, now))
        self._ended[key] = (max(number, highest), now)
        while len(self._ended) > self._max_entries:
            del self._ended[next(iter(self._ended))]
        self.expire(now)

    def covers(self, key: Key, number: int) -> bool:
        """Whether `number` of this key has ended."""
        entry = self._ended.get(key)
        return entry is not None and number <= entry[0]

    def expire(self, now: float) -> None:
        """Forget entries older than `max_age_s`. O(entries forgotten)."""
        while self._ended:
            oldest = next(iter(self._ended))
            if now - self._ended[oldest][1] <= self._max_age_s:
                return
            del self._ended[oldest]
