from xml.etree import ElementTree

import pytest

from load.plot import Axis, Line, bars, heatmap, line_chart


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3, 47, [10, 20, 30, 40])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert Axis(label="", low=low, high=high).ticks() == pytest.approx(ticks)


def test_log_ticks() -> None:
    assert Axis(label="", low=3, high=300, is_log=True).ticks() == [5, 10, 20, 50, 100, 200]


def test_positions_are_clamped_to_the_frame() -> None:
    axis = Axis(label="", low=10, high=20)
    assert [axis.position(value) for value in (0, 10, 15, 25)] == [0, 0, 0.5, 1]


def test_a_missing_value_breaks_the_line() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0), (4.0, 2.0)]
    assert line_chart([Line(name="a", points=points)], "x", "y").count("<polyline") == 2


def test_one_point_is_a_dot() -> None:
    assert 'class="dot' in line_chart([Line(name="a", points=[(1.0, 1.0)])], "x", "y", log_x=True)


def test_names_are_escaped() -> None:
    drawn = line_chart([Line(name="<b>", points=[(0.0, 1.0), (1.0, 1.0)])], "x<", "y&")
    ElementTree.fromstring(f"<div>{drawn}</div>")
    assert "<b>" not in drawn


@pytest.mark.parametrize(
    "drawn", [line_chart([], "x", "y"), bars([], "x"), heatmap([[0, 0]], 1.0, [0.0, 1.0], "y")]
)
def test_nothing_to_draw_says_so(drawn: str) -> None:
    assert "No data" in drawn


def test_the_heatmap_leaves_empty_cells_and_rows_out() -> None:
    drawn = heatmap([[0, 3, 0, 0], [0, 0, 5, 0]], 2.0, [0, 1, 2, 5], "gap, ms")
    assert drawn.count('class="cell"') == 2
    assert ">5<" not in drawn


def test_bars_of_zero() -> None:
    ElementTree.fromstring(bars([("a", 0.0)], "x"))
