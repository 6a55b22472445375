"""Holdback: tokens that routers may hear of later, so that a step of many costs what its news costs.

A router that is behind gets its tokens merged in production, too (replicas/frames.py). First tokens and
ends are news and pass at once, so times to the first token and to the end stay exact.
"""

from replicas.api import TokenDelta
from replicas.scheduler import Outputs

Key = tuple[str, int, int, int]


class Holdback:
    """Merges plain tokens of each output for up to `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._held: dict[Key, TokenDelta] = {}
        self._released_at = 0.0

    def filter(self, outputs: Outputs, now: float) -> Outputs:
        """Take a step's deltas; return what routers are to hear of now."""
        if not self._limit_s:
            return outputs
        news: Outputs = {}
        for owner, deltas in outputs.items():
            for delta in deltas:
                merged = self._merged(owner, delta)
                if merged is not None:
                    news.setdefault(owner, []).append(merged)
        if now - self._released_at >= self._limit_s:
            self._released_at = now
            for (owner, *_), delta in self._held.items():
                news.setdefault(owner, []).append(delta)
            self._held.clear()
        return news

    def _merged(self, owner: str, delta: TokenDelta) -> TokenDelta | None:
        """The delta with what was held before it; None when all of it is held."""
        key = owner, delta.request_id, delta.attempt, delta.index
        held = self._held.get(key)
        if delta.finish_reason is None and delta.num_cached_tokens is None:
            if held is None:
                self._held[key] = delta
            else:
                held.append(delta)
            return None
        if held is None:
            return delta
        del self._held[key]
        held.append(delta)
        return held
