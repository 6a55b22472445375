from cluster.bench.autoscaling import Stretch, cases, sample, spread


def stretches(count: int) -> list[Stretch]:
    return [Stretch(rates=(1.0, 1.0), seconds=60.0, seed=i) for i in range(count)]


def test_the_first_stretches_lie_all_over_the_record() -> None:
    assert [stretch.seed for stretch in spread(stretches(8))] == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(stretch.seed for stretch in spread(stretches(13))) == list(range(13))
    assert len(spread(stretches(1))) == 1


def test_a_sample_is_at_equal_distances() -> None:
    found = sample([float(i) for i in range(100)], 4, 600.0, seed=7)
    assert [stretch.rates[0] for stretch in found] == [11.0, 36.0, 61.0, 86.0]
    assert [stretch.seed for stretch in found] == [7, 8, 9, 10]


def test_further_cold_starts_are_those_of_headway_alone() -> None:
    assert cases(["headway", "hpa"], [60.0, 10.0]) == [
        ("headway", 60.0),
        ("hpa", 60.0),
        ("headway@10s", 10.0),
    ]
    assert cases(["hpa"], [60.0, 10.0]) == [("hpa", 60.0)]
