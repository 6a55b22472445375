from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopMatch, StopMatcher


def first_match(text: str, stops: tuple[str, ...]) -> StopMatch | None:
    """The definition: ends first; of those, begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return StopMatch(min(starts), end)
    return None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    return max(
        length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length]) or not length
    )


letters = st.text("ab", max_size=40)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(st.lists(letters, max_size=8), stop_sets)
def test_finds_what_the_definition_says_however_the_text_is_cut(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    matcher = StopMatcher(stops)
    found = next((match for piece in pieces if (match := matcher.feed(piece, enforce=True))), None)
    assert found == first_match("".join(pieces), stops)


@given(st.lists(letters, max_size=8), stop_sets)
def test_holds_exactly_what_may_begin_a_stop_string(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += piece
        if matcher.feed(piece, enforce=True):
            return
        assert matcher.held == longest_beginning(text, stops)


def test_a_match_that_is_not_enforced_is_passed_over() -> None:
    matcher = StopMatcher(("aba",))
    assert matcher.feed("aba", enforce=False) is None
    assert matcher.feed("ba", enforce=True) == StopMatch(2, 5)
