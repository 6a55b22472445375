"""A replica that is to go finishes what it has begun."""

import json
import threading

import httpx
import pytest

from tests.e2e.server import Server, wait_for

pytestmark = pytest.mark.e2e

NUM_STREAMS = 4
"""Two for each of the two replicas."""
BODY = {"model": "null", "prompt": "once", "max_tokens": 3500, "stream": True}
"""7 s of tokens: Serve notices the new number after one."""


def test_scaling_down_ends_no_stream(server: Server) -> None:
    finishes: list[object] = []
    started = threading.Barrier(NUM_STREAMS + 1)

    def stream() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=60) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            next(lines)
            started.wait(timeout=60)
            events = [json.loads(line) for line in lines if line != "[DONE]"]
        finishes.append([choice["finish_reason"] for choice in events[-1].get("choices", events[-1:])])

    threads = [threading.Thread(target=stream) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    started.wait(timeout=60)
    server.deploy(1)
    for thread in threads:
        thread.join(timeout=60)
    assert finishes == [["length"]] * NUM_STREAMS
    wait_for(
        lambda: len(server.processes("ServeReplica:headway:Replica")) == 1 or None, "one replica to be left"
    )
