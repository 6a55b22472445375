from replicas.api import GenerateRequest, SamplingParams
from replicas.kv_cache import KVCacheManager
from replicas.sequence import Sequence


def sequence(seq_id: int, token_ids: list[int], salt: str = "") -> Sequence:
    request = GenerateRequest(
        request_id=seq_id,
        prompt_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=4),
        cache_salt=salt,
    )
    return Sequence(
        seq_id=seq_id,
        owner="",
        request=request,
        index=0,
        arrival_at=0.0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        stop_ids=frozenset(),
        max_num_tokens=100,
    )


def computed(cache: KVCacheManager, seq: Sequence) -> None:
    """Start a sequence and pretend that all its tokens have been computed."""
    cache.start(seq, cache.match_prefix(seq))
    seq.num_computed_tokens = seq.num_tokens
    cache.register_computed(seq)


def test_full_blocks_are_shared_and_the_last_token_is_never_matched() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    first = sequence(1, list(range(1, 9)))
    computed(cache, first)
    assert first.block_table == [0, 1]

    twin = sequence(2, list(range(1, 9)))
    match = cache.match_prefix(twin)
    assert (match.block_ids, match.num_tokens) == ([0], 4)
    longer = sequence(3, [*range(1, 9), 50])
    match = cache.match_prefix(longer)
    assert (match.block_ids, match.num_tokens) == ([0, 1], 8)
    cache.start(longer, match)
    assert longer.block_table == [0, 1, 2]
    assert longer.num_computed_tokens == 8
    cache.check_integrity([first, longer])


def test_another_salt_or_another_first_token_does_not_match() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    computed(cache, sequence(1, list(range(1, 9))))
    assert cache.match_prefix(sequence(2, list(range(1, 10)), salt="tenant")).num_tokens == 0
    assert cache.match_prefix(sequence(3, [9, *range(2, 10)])).num_tokens == 0


def test_released_prefix_is_found_again_until_its_block_is_needed() -> None:
    cache = KVCacheManager(num_blocks=3, block_size=4)
    first = sequence(1, list(range(1, 9)))
    computed(cache, first)
    cache.release(first)
    again = sequence(2, [*range(1, 9), 50])
    assert cache.match_prefix(again).num_tokens == 8
    assert cache.num_blocks_missing(cache.match_prefix(again), again.num_tokens) == 3
    stranger = sequence(3, [90] * 8)
    cache.start(stranger, cache.match_prefix(stranger))
    assert stranger.block_table == [2, 1]
    assert cache.match_prefix(again).num_tokens == 4


def test_without_prefix_caching_nothing_matches() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=False)
    computed(cache, sequence(1, list(range(1, 9))))
    assert cache.match_prefix(sequence(2, list(range(1, 9)))).num_tokens == 0


def test_extend_allocates_only_when_a_block_is_full() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    seq = sequence(1, [1, 2, 3])
    computed(cache, seq)
    seq.token_ids.append(4)
    assert cache.num_blocks_to_extend(seq) == 0
    seq.token_ids.append(5)
    assert cache.num_blocks_to_extend(seq) == 1
    cache.extend(seq)
    assert seq.block_table == [0, 1]
