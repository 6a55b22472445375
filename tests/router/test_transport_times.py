import pytest

from replicas.api import FrameBatch
from router.transport_times import MAX_SAMPLES, TransportTimes


def test_percentiles_are_milliseconds_of_each_leg() -> None:
    times = TransportTimes()
    for i in range(1, 101):
        times.observe(FrameBatch([], delay_s=i / 1000, handed_at=50.0), arrived_at=50.0 + i / 500)
    summary = times.summary()
    assert summary.engine_to_frame.count == 100
    assert summary.engine_to_frame.p50 == pytest.approx(50.0)
    assert summary.engine_to_frame.p99 == pytest.approx(99.0)
    assert summary.frame_to_router.max == pytest.approx(200.0)


def test_only_recent_samples_count() -> None:
    times = TransportTimes()
    times.observe(FrameBatch([], delay_s=9.0, handed_at=0.0), arrived_at=9.0)
    for _ in range(MAX_SAMPLES):
        times.observe(FrameBatch([], delay_s=0.001, handed_at=0.0), arrived_at=0.001)
    assert times.summary().engine_to_frame.max == 1.0


def test_without_samples_all_is_zero() -> None:
    assert TransportTimes().summary().engine_to_frame.count == 0
