import re
from pathlib import Path

import pytest

from cluster.autoscaling_policy import Policy, PolicyError
from router.tenants import Tier


def test_the_minimum_may_not_be_above_the_maximum() -> None:
    with pytest.raises(PolicyError, match="min_replicas 3 is above max_replicas 2"):
        Policy(min_replicas=3, max_replicas=2)


def test_tiers_must_be_told_apart() -> None:
    with pytest.raises(PolicyError, match="two tiers have the level 0"):
        Policy(tiers=(Tier(name="a", level=0), Tier(name="b", level=0)))


def test_a_replica_may_go_after_five_cold_starts_unless_told_otherwise() -> None:
    assert Policy().down_delay_s(20.0) == 100.0
    assert Policy(downscale_delay_s=7.0).down_delay_s(20.0) == 7.0
    assert Policy(downscale_delay_s=7.0, to_zero_delay_s=9.0).zero_delay_s(20.0) == 9.0


def test_the_documented_defaults_are_those_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "autoscaling.md"
    documented = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page.read_text(), re.MULTILINE))
    numbers = {name: value for name in Policy.__struct_fields__ if (value := getattr(Policy(), name))}
    numbers.pop("tiers", None)
    assert {name: float(documented[name]) for name in numbers} == numbers
