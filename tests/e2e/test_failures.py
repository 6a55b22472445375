"""What clients see when processes die, and that nothing outlives a server."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, start_model, start_null, wait_for

pytestmark = pytest.mark.e2e

ROUTER = "ServeReplica:headway:Router"
REPLICA = "ServeReplica:headway:Replica"
ASK = {"model": "null", "prompt": "x", "max_tokens": 3}
LONG = {"model": "null", "prompt": "once", "max_tokens": 8000, "stream": True}


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One router, one replica: whatever is killed here is missed. Runs beside `server`."""
    server = start_null(tmp_path_factory.mktemp("small"), "engine: {max_num_seqs: 2}\n")
    yield server
    server.stop()


def answers(server: Server) -> bool | None:
    """True when a request is served; None when it is refused as it should be: by an error object."""
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=30)
    except httpx.TransportError:
        return None
    return True if answer.status_code == 200 else None


def test_without_a_replica_requests_get_503_and_the_router_stays(small_server: Server) -> None:
    (router,) = small_server.processes(ROUTER)
    (replica,) = small_server.processes(REPLICA)
    os.kill(replica, signal.SIGKILL)
    wait_for(lambda: httpx.get(f"{small_server.url}/health").status_code == 503 or None, "503 from /health")
    refused = httpx.post(f"{small_server.url}/v1/completions", json=ASK, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    wait_for(lambda: answers(small_server), "the replica to be replaced")
    assert small_server.processes(ROUTER) == [router]


def test_a_router_that_dies_frees_its_seats(small_server: Server) -> None:
    (router,) = small_server.processes(ROUTER)
    with httpx.Client(base_url=small_server.url, timeout=30) as http:
        for _ in range(2):  # all seats
            response = http.send(http.build_request("POST", "/v1/completions", json=LONG), stream=True)
            next(response.iter_raw())
        os.kill(router, signal.SIGKILL)
        # The streams would go on for 16 s; lease and grace end after 5.
        wait_for(lambda: answers(small_server), "seats and a new router")
    assert small_server.processes(ROUTER) != [router]


def test_one_of_two_clusters_on_a_host_ends_without_a_trace(server: Server, small_server: Server) -> None:
    assert answers(server)
    assert answers(small_server)
    members = small_server.processes()
    assert members
    assert small_server.stop() == 0
    assert [pid for pid in members if Path(f"/proc/{pid}").exists()] == []
    assert answers(server)


def test_too_little_memory_is_told_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^the server ended with 2: ") as refused:
        start_model(tmp_path, "engine: {kv_cache_memory: 1000}\n")
    line = str(refused.value).splitlines()[-1]
    assert line.startswith("headway: the KV pool of 0 MiB holds 0 tokens")
    assert "set kv_cache_memory >= 737280" in line
