"""API keys: their form, their keyed hash, and where a request may carry one.

A key is `hw_<id>_<secret>`: the id finds its record without a search, the secret has 256 random bits, so
one fast keyed hash protects it as well as a slow one would.
"""

import hmac
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Final
from urllib.parse import parse_qsl

from router.errors import ApiError

KEY: Final = re.compile(r"hw_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
MIN_PEPPER_BYTES: Final = 16
_KEY_NAMES: Final = re.compile(r"(api|access|auth)?[-_]?(key|token)|authorization|bearer", re.IGNORECASE)
_SCHEME: Final = re.compile(rb"bearer[ \t]+(\S+)[ \t]*\Z", re.IGNORECASE)


def format_key(key_id: str, secret: str) -> str:
    """`key_id`: 12 hex digits; `secret`: 43 characters of URL-safe base64 (32 random bytes)."""
    return f"hw_{key_id}_{secret}"


def key_id(key: str) -> str | None:
    """The id inside a key; None for what is no key of ours."""
    match = KEY.fullmatch(key)
    return match[1] if match else None


def hash_key(key: str, pepper: bytes) -> str:
    """HMAC-SHA256 in hex. Without the pepper a stolen key file tells nothing about the keys."""
    return hmac.digest(pepper, key.encode(), sha256).hex()


def pepper_check(pepper: bytes) -> str:
    """A value by which a wrong pepper is found before it makes every key wrong."""
    return hmac.digest(pepper, b"headway pepper", sha256).hex()[:16]


def matches(key: str, hashed: str, pepper: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hash_key(key, pepper), hashed)


def bearer(headers: Mapping[bytes, bytes]) -> str | None:
    """The key of an Authorization header; None if there is none. Raises ApiError 401 for another scheme."""
    value = headers.get(b"authorization")
    if value is None:
        return None
    match = _SCHEME.match(value.strip())
    if match is None:
        raise unauthorized("the Authorization header must be 'Bearer KEY'")
    return match[1].decode("latin-1")


def refuse_key_in_query(query: bytes) -> None:
    """Raise ApiError 400 for a URL that seems to carry a key: URLs end in logs and histories."""
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if _KEY_NAMES.fullmatch(name) or KEY.search(value) or KEY.search(name):
            raise ApiError(
                400, "a key must be sent in the Authorization header, never in the URL", code="key_in_url"
            )


def unauthorized(message: str) -> ApiError:
    """Return the 401 for a missing or wrong key. It does not tell a revoked key from an invented one."""
    return ApiError(401, message, code="invalid_api_key")
