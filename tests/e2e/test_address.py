"""`headway serve --address`: an application on a cluster that others have started."""

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, start, start_cluster

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cluster = start_cluster(tmp_path_factory.mktemp("cluster"), "")
    yield cluster
    cluster.stop()


def address(cluster: Server) -> str:
    return cluster.announced.splitlines()[1]


def serve(cluster: Server, config: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # the default of a local cluster
    arguments = [str(config), address(cluster)]
    return start(["cluster.bench.null_serve", *arguments], config, cluster.port)


def test_an_application_joins_a_running_cluster_and_leaves_it(
    cluster: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "app.yaml"
    config.write_text(
        f"name: guest\nhttp: {{port: {cluster.port}}}\nengine: {{num_threads: 1, max_num_seqs: 2}}\n"
    )
    server = serve(cluster, config, monkeypatch)
    body = {"model": "null", "prompt": "once", "max_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert len(cluster.processes("ServeReplica:guest:Replica")) == 1
    assert server.stop(signal.SIGINT) == 0
    assert cluster.process.poll() is None


def test_a_wrong_token_is_one_line(cluster: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "app.yaml"
    config.write_text(f"http: {{port: {cluster.port}}}\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(RuntimeError) as refused:
        serve(cluster, config, monkeypatch)
    *progress, line = str(refused.value).splitlines()
    assert progress == ["the server ended with 2: headway: starting Ray"]
    assert line.startswith(f"headway: no Ray cluster at {address(cluster)}: ")
    assert line.endswith("; is the token in RAY_AUTH_TOKEN or ~/.ray/auth_token the cluster's?")
