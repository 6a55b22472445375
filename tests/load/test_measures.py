import pytest

from load import measures
from load.answer import Failure
from load.tenants import Slo
from tests.load.records import record


def test_ttft_counts_from_the_accepted_attempt() -> None:
    one = record(5.0, 5.25, 5.5, first_sent_s=2.0)
    assert measures.ttft_ms(one) == pytest.approx(250)
    assert measures.retry_wait_ms(one) == pytest.approx(3000)


def test_ttft_of_no_output_is_none() -> None:
    assert measures.ttft_ms(record(5.0)) is None


def test_itl_is_every_gap() -> None:
    assert measures.itl_ms(record(0.0, 1.0, 1.05, 1.25)) == pytest.approx([50, 200])


def test_tokens_that_came_with_another_have_gaps_of_zero() -> None:
    bundled = record(0.0, 1.0, 1.2, output_tokens=5)
    assert sorted(measures.itl_ms(bundled)) == pytest.approx([0, 0, 0, 200])
    assert measures.event_gaps_ms(bundled) == pytest.approx([200])


def test_max_gap_is_what_the_reader_noticed() -> None:
    assert measures.max_gap_ms(record(0.0, 1.0, 1.05, 1.25)) == pytest.approx(200)
    assert measures.max_gap_ms(record(0.0, 1.0)) is None


def test_tpot_is_one_mean_per_request() -> None:
    assert measures.tpot_ms(record(0.0, 1.0, 1.1, 1.4)) == pytest.approx(200)
    assert measures.tpot_ms(record(0.0, 1.0, 1.4, output_tokens=5)) == pytest.approx(100)
    assert measures.tpot_ms(record(0.0, 1.0)) is None


def test_e2e_ends_with_the_stream() -> None:
    assert measures.e2e_ms(record(1.0, 1.5, 2.0, done_s=2.25)) == pytest.approx(1250)


@pytest.mark.parametrize(
    ("slo", "is_kept"),
    [
        (Slo(ttft=250), True),
        (Slo(ttft=249), False),
        (Slo(itl=151), True),
        (Slo(itl=140), False),
        (Slo(tpot=101), True),
        (Slo(tpot=99), False),
        (Slo(e2e=451), True),
        (Slo(e2e=449), False),
        (Slo(ttft=250, itl=140), False),
        (Slo(), True),
        (None, True),
    ],
)
def test_a_promise_is_kept_when_every_target_is(slo: Slo | None, is_kept: bool) -> None:
    assert measures.keeps(record(1.0, 1.25, 1.30, 1.45), slo) is is_kept


def test_waiting_for_a_retry_counts_against_the_promise() -> None:
    assert not measures.keeps(record(5.0, 5.1, first_sent_s=4.0), Slo(ttft=1000))


def test_a_failed_or_cancelled_request_keeps_nothing() -> None:
    assert not measures.keeps(record(0.0, 1.0, failure=Failure.TRUNCATED), None)
    assert not measures.keeps(record(0.0, 1.0, is_cancelled=True), None)


def test_usage_of_a_failed_answer_is_not_trusted() -> None:
    assert measures.num_tokens(record(0.0, 1.0, failure=Failure.ERROR_EVENT, output_tokens=90)) == 1
