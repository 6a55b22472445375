from random import Random

from router.prefix_index import prefix_hashes
from router.shortlist import MAX_COMPARED, PrefixOwners

FEW = {f"r{i}": i for i in range(MAX_COMPARED)}
MANY = {f"r{i}": i for i in range(10 * MAX_COMPARED)}
PROMPT = tuple(range(300))


def test_a_small_fleet_is_compared_as_a_whole() -> None:
    assert list(PrefixOwners().shortlist(FEW, (), Random(0))) == list(FEW.values())


def test_of_a_large_fleet_as_many_are_drawn_whatever_its_size() -> None:
    drawn = PrefixOwners().shortlist(MANY, (), Random(0))
    assert len(set(drawn)) == MAX_COMPARED


def test_the_owner_of_the_longest_known_beginning_is_always_compared() -> None:
    owners = PrefixOwners()
    owners.note(prefix_hashes(PROMPT[:128], ""), "r7")
    owners.note(prefix_hashes(PROMPT, ""), "r151")
    for seed in range(20):
        assert 151 in owners.shortlist(MANY, prefix_hashes((*PROMPT, *range(200)), ""), Random(seed))


def test_an_owner_that_is_gone_is_not_compared() -> None:
    owners = PrefixOwners()
    owners.note(prefix_hashes(PROMPT, ""), "gone")
    assert len(owners.shortlist(MANY, prefix_hashes(PROMPT, ""), Random(0))) == MAX_COMPARED


def test_what_was_sent_longest_ago_is_forgotten_first() -> None:
    owners = PrefixOwners(max_entries=4)
    first, second = prefix_hashes(PROMPT[:192], "a"), prefix_hashes(PROMPT[:192], "b")
    owners.note(first, "r1")
    owners.note(second, "r2")
    assert len(owners) == 4
    assert owners.find(second) == "r2"
    assert owners.find(first) == "r1"  # its beginning is left
    assert owners.find(first[1:]) is None
