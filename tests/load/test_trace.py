import random

import pytest

from load.errors import LoadError, TraceError
from load.servegen import inverse_cdf, servegen_trace
from load.trace import FOLDER, cut, jittered, parse_trace, read_trace, rescale

HEADER = "arrival_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.csv")))
def test_every_bundled_trace_can_be_read(name: str) -> None:
    trace = read_trace(name)
    assert len(trace.rows) > 1000
    assert trace.rate > 1


def test_rows_and_columns() -> None:
    trace = parse_trace("output_tokens,arrival_s,client_id,input_tokens\n7,0.5,bob,9\n\n1,2,eve,3\n", "t")
    assert [(r.at_s, r.input_tokens, r.output_tokens, r.client) for r in trace.rows] == [
        (0.5, 9, 7, "bob"),
        (2.0, 3, 1, "eve"),
    ]


def test_lengths_alone_are_a_trace_without_arrivals() -> None:
    trace = parse_trace("input_tokens,output_tokens\n3,4\n", "t")
    assert not trace.has_arrivals


def test_block_ranges_are_unfolded() -> None:
    text = "arrival_s,input_tokens,output_tokens,hash_ids\n0,2048,5,0-2 7\n"
    assert parse_trace(text, "t").rows[0].blocks == (0, 1, 2, 7)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, 1),
        ("arrival_s,input_tokens\n0,1\n", 1, 1),
        ("arrival_s,input_tokens,output_tokens,tier\n", 1, 38),
        ("input_tokens,output_tokens,input_tokens\n", 1, 28),
        (HEADER, 1, 1),
        (HEADER + "0,5,5\n1,many,5\n", 3, 3),
        (HEADER + "0,5,5\n1,5,0\n", 3, 5),
        (HEADER + "0,5,-5\n", 2, 5),
        (HEADER + "0,5,99999999999999999999\n", 2, 5),
        (HEADER + "x,5,5\n", 2, 1),
        (HEADER + "nan,5,5\n", 2, 1),
        (HEADER + "5,5,5\n4,5,5\n", 3, 1),
        (HEADER + "0,5\n", 2, 4),
        (HEADER + "0,5,5,5\n", 2, 8),
    ],
)
def test_a_mistake_is_named_with_line_and_column(text: str, line: int, column: int) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace(text, "t.csv")
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"t.csv:{line}:{column}: ")


@pytest.mark.parametrize("blocks", ["a", "3-", "-3", "9-3", "0-99999999999", "1-2-3"])
def test_block_ids_that_are_none(blocks: str) -> None:
    with pytest.raises(TraceError, match="hash_ids"):
        parse_trace(f"arrival_s,input_tokens,output_tokens,hash_ids\n0,5,5,{blocks}\n", "t")


def test_an_unknown_trace_names_the_bundled_ones() -> None:
    with pytest.raises(LoadError, match="azure2023-conv"):
        read_trace("nowhere")


def test_rescale_moves_the_start_and_scales_gaps_lengths_and_blocks() -> None:
    text = "arrival_s,input_tokens,output_tokens,hash_ids\n10,1000,100,0-1\n14,10,1,0\n"
    trace = rescale(parse_trace(text, "t"), rate_factor=2.0, length_factor=1 / 32)
    assert [row.at_s for row in trace.rows] == [0.0, 2.0]
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [(31, 3), (1, 1)]
    assert trace.block_tokens == 16


def test_jitter_spreads_arrivals_and_keeps_them_ordered() -> None:
    rows = HEADER + "".join(f"{3 * (i // 10)},5,5\n" for i in range(100))
    times = [row.at_s for row in jittered(parse_trace(rows, "t"), 3.0, random.Random(0)).rows]
    assert times == sorted(times)
    assert len(set(times)) == 100


def test_cut_leaves_out_what_is_late_or_long() -> None:
    trace = parse_trace(HEADER + "0,5,5\n1,50,5\n9,5,5\n", "t")
    assert [row.at_s for row in cut(trace, duration_s=5.0, max_total_tokens=20).rows] == [0.0]
    with pytest.raises(LoadError, match="no row"):
        cut(trace, duration_s=5.0, max_total_tokens=1)


def test_servegen_draws_the_rate_of_its_clients() -> None:
    trace = servegen_trace("deepseek-r1", 3600.0, random.Random(0))
    assert len({row.client for row in trace.rows}) > 10
    assert len(trace.rows) / 3600 == pytest.approx(15, rel=0.2)


def test_servegen_knows_its_models() -> None:
    with pytest.raises(LoadError, match="deepseek-r1, m-large"):
        servegen_trace("gpt", 10.0, random.Random(0))


def test_inverse_cdf_is_linear_between_quantiles() -> None:
    quantiles, values = (0.1, 0.5, 0.9), (10.0, 20.0, 100.0)
    assert [inverse_cdf(u, quantiles, values) for u in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)] == [
        10,
        10,
        15,
        20,
        60,
        100,
    ]
