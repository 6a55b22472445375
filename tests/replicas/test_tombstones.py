from replicas.tombstones import Tombstones


def test_covers_the_number_and_all_below_it() -> None:
    tombstones = Tombstones[str](max_entries=10, max_age_s=60.0)
    tombstones.bury("a", 3, now=0.0)
    assert [tombstones.covers("a", number) for number in (2, 3, 4)] == [True, True, False]
    assert not tombstones.covers("b", 0)


def test_a_lower_number_does_not_bring_back_a_higher_one() -> None:
    tombstones = Tombstones[str](max_entries=10, max_age_s=60.0)
    tombstones.bury("a", 3, now=0.0)
    tombstones.bury("a", 1, now=0.0)
    assert tombstones.covers("a", 3)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    tombstones = Tombstones[int](max_entries=2, max_age_s=60.0)
    tombstones.bury(1, 0, now=0.0)
    tombstones.bury(2, 0, now=1.0)
    tombstones.bury(1, 1, now=2.0)
    tombstones.bury(3, 0, now=3.0)
    assert [tombstones.covers(key, 0) for key in (1, 2, 3)] == [True, False, True]


def test_entries_are_forgotten_when_they_are_old() -> None:
    tombstones = Tombstones[int](max_entries=10, max_age_s=60.0)
    tombstones.bury(1, 0, now=0.0)
    tombstones.bury(2, 0, now=30.0)
    tombstones.expire(now=60.0)
    assert len(tombstones) == 2
    tombstones.expire(now=60.1)
    assert [tombstones.covers(key, 0) for key in (1, 2)] == [False, True]
