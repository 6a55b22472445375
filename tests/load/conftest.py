"""An echo server in a process of its own, for tests that drive whole commands."""

from collections.abc import Iterator

import pytest

from load.echo import Pace
from load.selftest import echo_process


@pytest.fixture(scope="session")
def echo_url() -> Iterator[str]:
    """The URL of a server that streams a token every 2 ms."""
    with echo_process(Pace(ttft_ms=4, itl_ms=2)) as port:
        yield f"http://127.0.0.1:{port}"
