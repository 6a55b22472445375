from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, start_null


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all: two routers, two replicas of two seats each, no model. No target: on a busy
    machine a test could not tell a refusal that the target is right about from one that is a fault."""
    server = start_null(
        tmp_path_factory.mktemp("server"),
        "replicas: 2\nrouter: {replicas: 2}\ntiers: [{name: only, level: 0}]\n"
        "engine: {max_num_seqs: 2, num_threads: 1, kv_cache_memory: 16384}\n",
    )
    yield server
    assert server.stop() == 0
