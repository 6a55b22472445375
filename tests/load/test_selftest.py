import io

import pytest
from rich.console import Console

from load.selftest import selftest, selftest_html, selftest_markdown
from tests.load.wellformed import check_page


def test_a_small_load_is_held_and_measured_rightly() -> None:
    result = selftest(10, 200.0, 2.0, Console(file=io.StringIO()), answer_s=1.0)
    assert result.failed == 0
    assert result.streams_held > 0
    assert result.cpu_us_per_token > 0
    assert (result.itl_ms_true, result.ttft_ms_true) == (50.0, 20.0)
    # A driver may see gaps late, never before their time: half of them cannot be much shorter.
    assert result.itl_ms_p50 == pytest.approx(50, rel=0.2)
    check_page(selftest_html(result))
    assert "Self-test" in selftest_markdown(result)
