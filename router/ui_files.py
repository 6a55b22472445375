"""The files of the live page, and what a browser is told about them: nothing from anywhere else, ever."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from router.errors import ApiError
from router.http import Exchange, Header

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
KINDS: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
PATHS: Final = frozenset(
    {"/ui", "/ui/", *(f"/ui/{path.name}" for path in FOLDER.iterdir() if path.suffix in KINDS)}
)
"""Served to everybody: the page's code is no secret, and a browser cannot send a key with a page."""
SECURITY: Final[tuple[Header, ...]] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    # A new version's files must not meet those of the old one.
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class UiFile:
    """A file and its response headers."""

    data: bytes
    headers: tuple[Header, ...]


@cache
def files() -> Mapping[str, UiFile]:
    """Read all files, once. Their paths are PATHS, but for /ui."""
    served = {
        f"/ui/{path.name}": UiFile(path.read_bytes(), ((b"content-type", KINDS[path.suffix]), *SECURITY))
        for path in FOLDER.iterdir()
        if path.suffix in KINDS
    }
    return served | {"/ui/": served[f"/ui/{INDEX}"]}


async def serve_file(exchange: Exchange) -> None:
    """Answer with the file under the request's path. Raises ApiError 404."""
    if exchange.path == "/ui":
        # Relative, so that it is right below whatever prefix the application has.
        await exchange.respond(307, b"", ((b"location", b"ui/"), *SECURITY))
        return
    file = files().get(exchange.path)
    if file is None:
        raise ApiError(404, "there is nothing under this URL", code="unknown_url")
    await exchange.respond(200, file.data, file.headers)
