import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.errors import ProtocolError
from load.sse import MAX_EVENT_BYTES, SseParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_one_event() -> None:
    assert parse(b"data: a\n\n") == [b"a"]


def test_several_events_in_one_chunk() -> None:
    assert parse(b"data: a\n\ndata: b\n\ndata: c\n\n") == [b"a", b"b", b"c"]


def test_no_space_after_the_colon() -> None:
    assert parse(b"data:a\n\n") == [b"a"]


def test_only_one_space_is_taken_off() -> None:
    assert parse(b"data:  a\n\n", b"data: b\n\n") == [b" a", b"b"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end(end: bytes) -> None:
    assert parse(b"data: a" + end + end + b"data: b" + end + end) == [b"a", b"b"]


def test_line_ends_may_be_mixed() -> None:
    assert parse(b"data: a\r\n\ndata: b\n\r\n") == [b"a", b"b"]


def test_crlf_split_between_reads_is_one_line_end() -> None:
    assert parse(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == [b"a\nb"]


def test_comments_are_no_events() -> None:
    assert parse(b": keepalive\n\n:\n\ndata: a\n: in between\n\n") == [b"a"]


def test_data_lines_join() -> None:
    assert parse(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_other_fields_are_read_over() -> None:
    assert parse(b"event: error\nid: 7\nretry: 10\ndata: a\nnonsense\n\n") == [b"a"]


def test_blank_lines_without_data_are_nothing() -> None:
    assert parse(b"\n\n\ndata: a\n\n\n\n") == [b"a"]


def test_empty_data_is_an_event() -> None:
    assert parse(b"data\n\ndata:\n\n") == [b"", b""]


def test_byte_order_mark_at_the_start() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\n") == [b"a"]
    assert parse(b"\xef", b"\xbb\xbfdata: a\n\n") == [b"a"]


def test_unicode_line_separators_are_no_line_ends() -> None:
    text = '{"text":"\u2028\u0085"}'.encode()
    assert parse(b"data: " + text + b"\n\n") == [text]


def test_an_unfinished_event_is_held() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]


def test_fast_path_does_not_swallow_a_multi_line_event() -> None:
    assert parse(b"data: a\nid: 3\n\ndata: b\n\n") == [b"a", b"b"]


def test_a_line_without_end_is_refused() -> None:
    parser = SseParser()
    parser.feed(b"x" * MAX_EVENT_BYTES)
    with pytest.raises(ProtocolError, match="longer"):
        parser.feed(b"x")


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
pieces = st.sampled_from([b"data: x", b"data:y", b": comment", b"event: e", b"data: {}", b"junk", b""])


@given(st.lists(st.tuples(pieces, line_ends), max_size=12), st.data())
def test_cutting_a_stream_anywhere_changes_nothing(
    lines: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(line + end for line, end in lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(*chunks) == parse(*(stream[i : i + 1] for i in range(len(stream))))
