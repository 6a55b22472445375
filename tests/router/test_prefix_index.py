from router.prefix_index import STRIDE_TOKENS, PrefixIndex, prefix_hashes

PROMPT = list(range(5 * STRIDE_TOKENS))


def test_equal_beginnings_have_equal_hashes() -> None:
    other = [*PROMPT[: 3 * STRIDE_TOKENS], *reversed(PROMPT[3 * STRIDE_TOKENS :])]
    first, second = prefix_hashes(PROMPT, ""), prefix_hashes(other, "")
    assert len(first) == 5
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 3 + [False] * 2


def test_equal_strides_after_different_beginnings_differ() -> None:
    shifted = [*([7] * STRIDE_TOKENS), *PROMPT[STRIDE_TOKENS:]]
    assert not set(prefix_hashes(PROMPT, "")) & set(prefix_hashes(shifted, ""))


def test_another_salt_shares_nothing() -> None:
    assert not set(prefix_hashes(PROMPT, "a")) & set(prefix_hashes(PROMPT, "b"))


def test_the_rest_of_a_stride_does_not_count() -> None:
    assert prefix_hashes(PROMPT[: STRIDE_TOKENS - 1], "") == []
    assert prefix_hashes([*PROMPT, 1], "") == prefix_hashes(PROMPT, "")


def test_a_match_ends_at_the_first_unknown_stride() -> None:
    index = PrefixIndex(100)
    index.note([1, 2, 3])
    assert [index.match(hashes) for hashes in ([1, 2, 9, 3], [9, 1], [1, 2, 3, 4], [])] == [2, 0, 3, 0]


def test_the_least_recently_used_is_forgotten_ends_first() -> None:
    index = PrefixIndex(4)
    index.note([1, 2, 3])
    index.note([7, 8])
    assert (len(index), index.match([1, 2, 3]), index.match([7, 8])) == (4, 2, 2)
    index.note([1, 2])
    index.note([5])
    assert (index.match([1, 2]), index.match([7, 8]), index.match([5])) == (2, 1, 1)
