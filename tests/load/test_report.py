from pathlib import Path
from typing import Any

import msgspec
import pytest

from load.answer import Failure
from load.compare import comparison_html, comparison_markdown, differences
from load.errors import LoadError
from load.page import to_html
from load.plan import Tenant
from load.record import RequestRecord, WorkerEnd
from load.report import Report, build_report, read_report, to_json
from load.run import Outcome
from load.table import to_markdown
from load.tenants import Cast, Slo, Source
from tests.load.records import record
from tests.load.wellformed import check_page

TWO = Cast(
    sources=(
        Source(tenant=Tenant(name="a", tier="fast")),
        Source(tenant=Tenant(name="<b>", tier="slow")),
    ),
    slos={"fast": Slo(ttft=300)},
)


def build(records: list[RequestRecord], cast: Cast | None = None, **fields: Any) -> Report:
    lags = fields.pop("loop_lag_ms", [0.1] * 100)
    outcome = Outcome(
        started_at=0.0,
        wall_s=10.0,
        records=records,
        ends=[WorkerEnd(worker=0, cpu_s=0.001, loop_lag_ms=lags)],
        is_interrupted=fields.pop("is_interrupted", False),
    )
    window = {"duration_s": 10.0, "warmup_s": 0.0, "cooldown_s": 0.0, "max_lateness_ms": 20.0}
    return build_report(outcome, cast or Cast(), {"seed": 1}, name="run", **(window | fields))


def test_counts_and_rates() -> None:
    report = build(
        [
            record(1.0, 1.2, 1.3),
            record(2.0, 2.5, is_cancelled=True),
            record(3.0, failure=Failure.HTTP_STATUS, status=429),
            record(4.0, failure=Failure.CONNECT, status=0),
        ]
    )
    total = report.total
    assert (total.requests, total.answered, total.cancelled, total.failed) == (4, 1, 1, 2)
    assert total.errors == {"http_429": 1, "connect": 1}
    assert total.requests_per_s == pytest.approx(0.1)
    assert total.output_tokens_per_s == pytest.approx(0.3)
    assert total.goodput_rps == pytest.approx(0.1)
    assert total.goodput_fraction == pytest.approx(1 / 3)


def test_warm_up_and_cool_down_are_cut_by_when_requests_were_due() -> None:
    records = [record(float(i), i + 0.1 * (i + 1)) for i in range(10)]
    report = build(records, warmup_s=2.0, cooldown_s=3.0)
    assert report.total.requests == 6
    assert report.window_s == (2.0, 7.0)
    assert report.total.ttft_ms is not None
    assert report.total.ttft_ms.max == pytest.approx(800)


def test_nothing_in_the_window_is_an_error() -> None:
    with pytest.raises(LoadError, match="nothing to report"):
        build([record(1.0, 1.2)], warmup_s=5.0)


def test_slow_readers_are_in_no_latency() -> None:
    report = build([record(1.0, 1.1, 1.2), record(1.0, 1.1, 9.0, is_slow=True)])
    assert report.total.slow == 1
    assert report.total.answered == 2
    assert report.total.itl_ms is not None
    assert report.total.itl_ms.max == pytest.approx(100)
    assert report.total.goodput_fraction == 1.0


def test_tiers_are_judged_by_their_own_promise() -> None:
    records = [record(1.0, 1.2), record(1.0, 1.4), record(1.0, 1.4, tenant=1)]
    report = build(records, TWO)
    assert report.tiers["fast"].goodput_fraction == 0.5
    assert report.tiers["slow"].goodput_fraction == 1.0
    assert report.total.goodput_fraction == pytest.approx(2 / 3)
    assert report.tenants["<b>"].tier == "slow"


def test_fairness_is_against_what_was_asked() -> None:
    modest = [record(1.0, 1.1, 1.2), *(record(1.0, *[1.1] * 10, tenant=1) for _ in range(3))]
    assert build(modest, TWO).jain_index == pytest.approx(1.0)
    starved = [record(1.0, asked_output_tokens=10), record(1.0, *[1.1] * 10, tenant=1)]
    assert build(starved, TWO).jain_index < 0.75


@pytest.mark.parametrize(
    ("fields", "mismatches"),
    [
        ({}, 0),
        ({"output_tokens": 1}, 1),
        ({"output_tokens": 9, "asked_output_tokens": 9}, 0),
        ({"output_tokens": 9, "asked_output_tokens": 8}, 1),
        ({"output_tokens": 9, "asked_output_tokens": 80, "finish_reason": "stop"}, 0),
        ({"output_tokens": None}, 0),
    ],
)
def test_usage_that_cannot_be_true_is_a_mismatch(fields: dict[str, Any], mismatches: int) -> None:
    report = build([record(1.0, 1.1, 1.2, 1.3, **fields)])
    assert report.usage_mismatches == mismatches
    assert report.usage_missing == (fields.get("output_tokens", 0) is None)


def test_tokens_without_an_event_of_their_own_are_counted() -> None:
    assert build([record(1.0, 1.1, 1.2, output_tokens=5, asked_output_tokens=5)]).bundled_tokens == 3


def test_prompt_lengths_are_checked_against_the_plan() -> None:
    records = [record(1.0, 1.1, prompt_tokens=12), record(1.0, 1.1, prompt_tokens=10)]
    assert build(records).prompt_token_error == pytest.approx(0.1)


def test_a_late_driver_voids_the_run() -> None:
    report = build([record(1.0, 1.2, due_s=0.95)])
    assert report.driver.lateness_ms_p99 == pytest.approx(50)
    assert not report.is_valid
    assert "50.0 ms late" in report.invalid_because[0]


def test_late_timers_void_the_run_too() -> None:
    assert not build([record(1.0, 1.2)], loop_lag_ms=[0.0] * 90 + [80.0] * 10).is_valid


def test_an_interrupted_run_is_void() -> None:
    assert build([record(1.0, 1.2)], is_interrupted=True).invalid_because == ["the run was interrupted"]


def test_json_has_the_keys_others_rely_on() -> None:
    fields = msgspec.json.decode(msgspec.json.encode(to_json(build([record(1.0, 1.2, 1.3)]))))
    assert fields["schema_version"] == 1
    for key in (
        "requests",
        "errors",
        "goodput_rps",
        "jain_index",
        "usage_mismatches",
        "driver_lateness_ms_p99",
    ):
        assert key in fields
    for measure in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert {"p50", "p90", "p99", "mean"} <= set(fields[measure])


def test_a_report_survives_its_json(tmp_path: Path) -> None:
    report = build([record(1.0, 1.2, 1.3), record(2.0, 2.2, tenant=1)], TWO)
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(to_json(report)))
    assert read_report(path) == report


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"kind":"headway-load-report"}', '{"kind":"headway-load-report","schema_version":1}'],
)
def test_a_file_that_is_no_report(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(LoadError, match=r"a\.json"):
        read_report(path)


def test_the_page_is_well_formed_and_needs_no_other_host() -> None:
    records = [record(i / 10, i / 10 + 0.2, i / 10 + 0.3, tenant=i % 2) for i in range(90)]
    failed = record(1.0, failure=Failure.NOT_SSE, detail="<script>alert(1)</script>")
    text = to_html(build([*records, failed], TWO))
    check_page(text)
    assert "<script" not in text
    assert "&lt;b&gt;" in text


def test_a_page_without_any_answer() -> None:
    check_page(to_html(build([record(1.0, failure=Failure.CONNECT, status=0)])))


def test_markdown_names_what_is_wrong() -> None:
    text = to_markdown(
        build([record(1.0, 1.2), record(2.0, failure=Failure.HTTP_STATUS, status=401, detail="key|x")])
    )
    assert "http_401 1" in text
    assert "key\\|x" in text


def test_comparison_says_which_differences_are_clear() -> None:
    def run(ttft_s: float) -> Report:
        return build([record(i / 10, i / 10 + ttft_s + i / 1000) for i in range(50)])

    by_name = {one.measure: one for one in differences(run(0.1), run(0.5))}
    ttft = by_name["TTFT p50, ms"]
    assert ttft.is_clear
    assert ttft.change == pytest.approx(400 / 124.5, rel=0.01)
    same = {one.measure: one for one in differences(run(0.1), run(0.1))}
    assert same["TTFT p50, ms"].is_clear is False


def test_comparison_pages() -> None:
    a, b = build([record(1.0, 1.2, 1.3)]), build([record(1.0, 1.4, 1.6)], is_interrupted=True)
    check_page(comparison_html([a, b, a]))
    text = comparison_markdown([a, b])
    assert "+100.0%" in text
    assert "interrupted" in text
