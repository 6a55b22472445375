"""Applications on a cluster that others have started: `headway serve --address`, and others beside it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import ROOT, Server, start, start_cluster, wait_for

pytestmark = pytest.mark.e2e

BODY = {"model": "null", "prompt": "once", "max_tokens": 3}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cluster = start_cluster(tmp_path_factory.mktemp("cluster"), "")
    yield cluster
    cluster.stop()


def address(cluster: Server) -> str:
    return cluster.announced.splitlines()[1]


def is_ready(url: str) -> bool | None:
    return True if httpx.get(url).status_code == 200 else None


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
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert len(cluster.processes("ServeReplica:guest:Replica")) == 1
    assert server.stop(signal.SIGINT) == 0
    assert cluster.process.poll() is None


def test_two_applications_share_an_address(cluster: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    command = [sys.executable, "-m", "tests.e2e.two_models", address(cluster)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    for name in ("small", "large"):
        wait_for(partial(is_ready, f"{cluster.url}/{name}/health"), f"{name} to answer")
        answer = httpx.post(f"{cluster.url}/{name}/v1/completions", json=BODY, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3


def test_a_deployment_that_is_not_ours_is_scaled_by_what_it_reports(
    cluster: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replicas(number: int) -> bool | None:
        return len(cluster.processes("ServeReplica:foreign:Worker")) == number or None

    def report(backlog_s: float) -> None:
        figures = json.dumps({"my_work_seconds_total": 0.0, "my_backlog_seconds": backlog_s})
        (tmp_path / "new").write_text(figures)
        (tmp_path / "new").rename(tmp_path / "figures")

    report(backlog_s=0.0)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    command = [sys.executable, "-m", "tests.e2e.foreign", address(cluster), str(tmp_path / "figures")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    assert replicas(1)
    report(backlog_s=60.0)
    wait_for(partial(replicas, 3), "three for a minute of work each")
    report(backlog_s=0.0)
    wait_for(partial(replicas, 1), "one for no work")


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
