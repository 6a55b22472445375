import json

from router import sse
from router.errors import ApiError


def test_an_event_is_one_line_of_json_and_a_blank_line() -> None:
    assert sse.event({"a": "b\r\nc"}) == b'data: {"a":"b\\r\\nc"}\n\n'


def test_no_character_that_any_client_takes_for_a_line_end_is_sent_raw() -> None:
    text = "a\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029é😀"
    raw = sse.event({"content": text})
    assert len(raw.decode().removesuffix("\n\n").splitlines()) == 1
    assert json.loads(raw.removeprefix(b"data: ")) == {"content": text}


def test_an_error_event_holds_the_error_object() -> None:
    raw = sse.error_event(ApiError(500, "gone\u2028", type="server_error", code="c"))
    assert raw.endswith(b"\n\n")
    assert json.loads(raw.removeprefix(b"data: "))["error"] == {
        "message": "gone\u2028",
        "type": "server_error",
        "param": None,
        "code": "c",
    }
