"""JSON request bodies -> typed structs. Whatever is wrong with one becomes a 400 that says where."""

import re
from typing import Final, TypeVar

import msgspec

from router.errors import ApiError

T = TypeVar("T")

_PATH: Final = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING_FIELD: Final = re.compile(r"Object missing required field `(\w+)`")
# Strings and braces are all that matters for finding keys in valid JSON; a string before a colon is one.
_KEYS_AND_BRACES: Final = re.compile(rb'"((?:[^"\\]++|\\.)*+)"(\s*:)?|[{}]', re.DOTALL)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode `body`. Raises ApiError 400 for bad JSON, wrong types, unknown or duplicate fields."""
    if not body:
        raise _malformed("the request body is empty; a JSON object was expected")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise _malformed(f"invalid UTF-8 (byte {error.start})") from None
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(_with_position(str(error), body)) from None
    except RecursionError:
        raise _malformed("the JSON is nested too deeply") from None
    duplicate = _duplicate_position(body)
    if duplicate is not None:
        raise _malformed(f"an object has the same key twice (byte {duplicate})")
    return value


def _malformed(message: str) -> ApiError:
    return ApiError(400, f"Could not parse the request body: {message}", code="invalid_json")


def _with_position(message: str, body: bytes) -> str:
    return message if "(byte" in message else f"{message} (byte {len(body)})"


def _invalid(message: str) -> ApiError:
    """Turn msgspec's message into a refusal that names the field as OpenAI does."""
    if unknown := _UNKNOWN_FIELD.match(message):
        field = unknown[1] if unknown[2] is None else f"{unknown[2]}.{unknown[1]}"
        field = field[:64]
        return ApiError(400, f"Unknown field: {field}", param=field, code="unknown_parameter")
    path = _PATH.search(message)
    param = path[1] if path else None
    text = _PATH.sub("", message)
    if missing := _MISSING_FIELD.match(message):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(
            400, f"Missing required field: {param}", param=param, code="missing_required_parameter"
        )
    return ApiError(400, f"{param}: {text}" if param else text, param=param, code="invalid_type")


def _duplicate_position(body: bytes) -> int | None:
    """Find the first key that its object already has. `body` is valid JSON; O(len(body))."""
    objects: list[set[bytes]] = []
    for match in _KEYS_AND_BRACES.finditer(body):
        if match[2] is not None:
            key = match[1]
            if b"\\" in key:
                key = msgspec.json.decode(b'"' + key + b'"').encode()
            if key in objects[-1]:
                return match.start()
            objects[-1].add(key)
        elif match[0] == b"{":
            objects.append(set())
        elif match[0] == b"}":
            objects.pop()
    return None
