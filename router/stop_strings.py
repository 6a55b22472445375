"""Stop strings: found across token boundaries, with nothing of one ever given away."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was completed by the text just fed."""

    start: int
    """Where it begins, in characters of all text fed so far."""
    end: int


class StopMatcher:
    """Looks for several stop strings in text that arrives in pieces.

    Of several matches the one that ends first wins, of those the longest: so the result does not depend
    on where the pieces were cut. One Knuth-Morris-Pratt automaton per string; O(1) per character and
    string, and most pieces are passed over without looking at their characters one by one.
    """

    __slots__ = ("_failures", "_first_chars", "_num_chars", "_states", "_stops", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` are not empty strings."""
        self._stops = stops
        self._failures = [_failure_function(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._num_chars = 0
        self.held = 0
        """How many characters at the end of the text may be the beginning of a stop string."""

    def feed(self, text: str, *, enforce: bool) -> StopMatch | None:
        """Continue with `text`; return the first match that ends in it.

        With `enforce` false matches are passed over, and text that only began there can still be
        completed later. After a match the matcher is spent.
        """
        if not self.held and self._first_chars.isdisjoint(text):
            self._num_chars += len(text)
            return None
        for char in text:
            self._num_chars += 1
            completed = self._advance(char)
            if completed and enforce:
                return StopMatch(self._num_chars - completed, self._num_chars)
        self.held = max(self._states)
        return None

    def _advance(self, char: str) -> int:
        """Step all automata; return the length of the longest string completed, or 0."""
        completed = 0
        states = self._states
        for i, stop in enumerate(self._stops):
            failure = self._failures[i]
            state = states[i]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                completed = max(completed, state)
                state = failure[state - 1]
            states[i] = state
        return completed


def _failure_function(pattern: str) -> list[int]:
    """Return per prefix the length of its longest proper border (Knuth, Morris, Pratt 1977)."""
    failure = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = failure[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        failure[i] = length
    return failure
