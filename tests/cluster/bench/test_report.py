import json
import math

import pytest

from cluster.bench.report import percentile, print_report


def test_percentiles_are_nearest_rank() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 1) == 7.0
    assert math.isnan(percentile([], 50))


def test_json_report_is_one_object_with_rounded_floats(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"a": 1.23456789, "b": math.nan, "c": "x", "d": 3}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": 1.235, "b": None, "c": "x", "d": 3}


def test_what_json_lacks_is_null_at_any_depth(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"tiers": {"low": {"ttft_ms": math.nan}}, "ci": (1.0, math.inf)}, as_json=True)
    assert capsys.readouterr().out == '{"tiers": {"low": {"ttft_ms": null}}, "ci": [1.0, null]}\n'
