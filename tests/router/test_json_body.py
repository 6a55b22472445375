import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.json_body import decode_body
from router.protocol import CHAT_DECODER, COMPLETION_DECODER

ANYTHING = msgspec.json.Decoder()


def refusal(body: bytes, decoder: "msgspec.json.Decoder[object]" = CHAT_DECODER) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_body(body, decoder)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "position"),
    [
        (b'{"messages": [', "byte 14"),
        (b'{"messages": [], "temperature": NaN}', "byte 32"),
        (b'{"messages": [}', "byte 14"),
        (b'{"user": "ab\xff", "messages": []}', "byte 12"),
        (b'\xef\xbb\xbf{"messages": []}', "byte 0"),
        (b'{"messages": [], "n": 1, "n": 2}', "byte 25"),
        (b'{"messages": []} {}', "trailing characters (byte"),
    ],
)
def test_malformed_json_is_refused_with_its_position(body: bytes, position: str) -> None:
    error = refusal(body)
    assert error.code == "invalid_json"
    assert position in error.message


def test_an_empty_body_is_refused() -> None:
    assert "empty" in refusal(b"").message


def test_an_array_body_is_refused() -> None:
    assert refusal(b"[]").code == "invalid_type"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"messages":[],"tools":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)
def test_deep_nesting_is_refused(body: bytes) -> None:
    refusal(body)


def test_a_lone_surrogate_is_refused() -> None:
    assert refusal(b'{"prompt": "\\ud800"}', COMPLETION_DECODER).code == "invalid_json"


def test_an_unknown_field_is_named_with_its_path() -> None:
    error = refusal(b'{"messages": [{"role": "user", "content": "x", "colour": 1}]}')
    assert (error.code, error.param) == ("unknown_parameter", "messages[0].colour")


def test_a_huge_unknown_field_name_is_cut() -> None:
    assert len(refusal(b'{"messages": [], "%b": 1}' % (b"x" * 100_000)).body()) < 500


def test_a_wrong_type_names_the_field() -> None:
    error = refusal(b'{"messages": [], "max_tokens": true}')
    assert (error.code, error.param) == ("invalid_type", "max_tokens")


def test_a_missing_field_is_named() -> None:
    assert refusal(b'{"model": "m"}').param == "messages"


def test_a_key_is_the_same_however_it_is_escaped() -> None:
    assert "same key twice" in refusal(b'{"n": 1, "\\u006e": 2, "messages": []}').message


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "n", "content": "n"}, {"role": "n", "content": "\\"n\\": {"}], "n": 1}',
        b'{"messages": [], "user": "a\\\\", "model": "messages"}',
    ],
)
def test_equal_strings_that_are_no_keys_of_one_object_are_fine(body: bytes) -> None:
    decode_body(body, CHAT_DECODER)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values, st.booleans())
def test_json_without_duplicates_decodes_unchanged(value: object, ascii_only: bool) -> None:
    assert decode_body(json.dumps(value, ensure_ascii=ascii_only).encode(), ANYTHING) == value


@given(st.text(), json_values, json_values)
def test_a_duplicate_key_is_found_behind_any_value(key: str, before: object, between: object) -> None:
    name = json.dumps(key)
    other = json.dumps(key + "!")
    body = f"[{json.dumps(before)}, {{{name}: 1, {other}: {json.dumps(between)}, {name}: 2}}]"
    assert "same key twice" in refusal(body.encode(), ANYTHING).message
