import math

import pytest

from cluster.bench import quality
from cluster.bench.quality import Comparison, compare
from replicas.api import TokenLogprobs, TopLogprob
from tests.cluster.bench.test_commands import run


def said(logprob: float, best: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=logprob, top=(TopLogprob(token_id=best, logprob=-0.1),))


def test_a_comparison_counts_agreement_and_the_mean_logprob() -> None:
    ours = [said(-1.0, 5), said(-3.0, 6), said(-2.0, 7), said(-2.0, 7)]
    theirs = [said(-1.0, 5), said(-1.0, 6), said(-1.0, 8), said(-1.0, 7)]
    result = compare(ours, theirs)
    assert result.positions == 4
    assert result.agreement == 0.75
    assert result.perplexity == pytest.approx(math.exp(2))
    assert result.reference_perplexity == pytest.approx(math.e)


@pytest.mark.parametrize(
    ("perplexity", "agreement", "passed"),
    [(10.1, 0.93, True), (10.2, 0.99, False), (9.0, 0.929, False)],
)
def test_the_gate_asks_for_both(perplexity: float, agreement: float, passed: bool) -> None:
    result = Comparison(positions=9, perplexity=perplexity, reference_perplexity=10.0, agreement=agreement)
    assert result.passed is passed


def test_int8_passes_the_gate_on_the_demo_model() -> None:
    """Where 8-bit weights multiply exactly; elsewhere 7 bits must keep the perplexity at least."""
    from replicas.model_int8 import WEIGHT_LEVELS, weight_levels
    from replicas.model_team import open_team

    report = run(quality, "--num-threads", "1")
    assert report["positions"] == 2012
    assert report["quantization"] == "int8"
    assert float(str(report["perplexity_ratio"])) <= quality.MAX_PERPLEXITY_RATIO
    if weight_levels(open_team(1)) == WEIGHT_LEVELS[0]:
        assert report["passed"]
