import random
import statistics

import pytest

from load.errors import LoadError
from load.lengths import parse_lengths


def draw(text: str, count: int = 20_000) -> list[int]:
    lengths, rng = parse_lengths(text), random.Random(1)
    return [lengths.draw(rng) for _ in range(count)]


def test_fixed() -> None:
    assert set(draw("256", 10)) == {256}


def test_uniform_includes_both_ends() -> None:
    assert set(draw("uniform:3:6")) == {3, 4, 5, 6}


def test_lognormal_has_its_median_and_its_cap() -> None:
    drawn = draw("lognormal:100:0.6:400")
    assert statistics.median(drawn) == pytest.approx(100, rel=0.03)
    assert max(drawn) == 400
    assert min(drawn) >= 1


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-3", "1e9", "uniform:5", "uniform:9:3", "lognormal:a:b", "beta:1:2"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(LoadError):
        parse_lengths(text)
