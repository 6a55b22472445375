import pytest

from load.sweep import Probe, Search, knee, sweep_html, sweep_markdown, verdict
from tests.load.records import record
from tests.load.test_report import build
from tests.load.wellformed import check_page

REPORT = build([record(1.0, 1.2, 1.3)])


def search(capacity: float, **fields: float) -> list[Probe]:
    plan = Search(**{"first_rate": 1.0, "precision": 0.1, "max_probes": 30} | fields)  # type: ignore[arg-type]
    probes: list[Probe] = []
    while (rate := plan.next_rate(probes)) is not None:
        probes.append(Probe(rate=rate, is_kept=rate <= capacity, report=REPORT))
    return probes


@pytest.mark.parametrize("capacity", [0.3, 1.0, 6.0, 100.0])
def test_the_knee_is_found_within_the_precision(capacity: float) -> None:
    found = knee(search(capacity))
    assert found is not None
    assert found <= capacity < found * 1.1


def test_the_rate_is_doubled_until_the_promise_breaks() -> None:
    assert [probe.rate for probe in search(6.0)][:4] == [1, 2, 4, 8]


def test_the_search_ends_after_its_probes() -> None:
    assert len(search(1e9, max_probes=5)) == 5
    assert len(search(0.0, max_probes=5)) == 5


def test_a_rate_that_held_above_one_that_broke_was_luck() -> None:
    probes = [
        Probe(rate=rate, is_kept=kept, report=REPORT) for rate, kept in ((1, True), (2, False), (4, True))
    ]
    assert knee(probes) == 1


def test_the_verdict_in_words() -> None:
    assert "up to 5.66 requests/s; at 6.17 it breaks" in verdict(search(6.0), 0.99)
    assert "No rate down to" in verdict(search(0.0, max_probes=3), 0.99)
    assert "no rate tried broke it" in verdict(search(1e9, max_probes=3), 0.99)


def test_pages() -> None:
    check_page(sweep_html(search(6.0), 0.99))
    assert "| 8 | breaks |" in sweep_markdown(search(6.0), 0.99)
