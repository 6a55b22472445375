"""Replicas that are to go finish what they have begun."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.server import Server, wait_for

pytestmark = pytest.mark.e2e

NUM_STREAMS = 4
"""Two for each of the two replicas."""
BODY = {"model": "null", "prompt": "once", "max_tokens": 3500, "stream": True}
"""7 s of tokens: Serve notices the new number after one."""
REPLICA = "ServeReplica:headway:Replica"


@pytest.fixture(autouse=True)
def two_replicas(server: Server) -> Iterator[None]:
    """The shared server keeps its replicas for the tests after this one."""
    yield
    server.deploy(2)
    wait_for_replicas(server, 2)


def wait_for_replicas(server: Server, number: int) -> None:
    wait_for(lambda: len(server.processes(REPLICA)) == number or None, f"{number} replicas")


def finish(server: Server, started: threading.Barrier) -> object:
    """Why a stream ended; `started` is waited for at its first event."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=60) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        started.wait(timeout=60)
        events = [json.loads(line) for line in lines if line != "[DONE]"]
    return [choice["finish_reason"] for choice in events[-1].get("choices", events[-1:])]


def test_fewer_and_newer_replicas_end_no_stream(server: Server) -> None:
    started = threading.Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(finish, server, started) for _ in range(NUM_STREAMS)]
        started.wait(timeout=60)
        server.deploy(1)
    assert [stream.result() for stream in streams] == [["length"]] * NUM_STREAMS
    wait_for_replicas(server, 1)
