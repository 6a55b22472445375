"""`headway deploy` on three hosts: `ray up`, an application over two of them, the end of one, `down`."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.server import ROOT

pytestmark = pytest.mark.skipif("LAB" not in os.environ, reason="needs several hosts: make test-cluster")

HEAD = "10.77.0.1"
URL = f"http://{HEAD}:8000"
WORKERS = ("10.77.0.2", "10.77.0.3")
NUM_STREAMS = 4
"""Two for each of the two replicas."""
BODY = {
    "model": "null",
    "prompt": "once",
    "max_tokens": 3500,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def on_host(address: str, *command: str) -> subprocess.CompletedProcess[str]:
    return lab("in", address, *command)


def lab(verb: str, address: str, *command: str) -> subprocess.CompletedProcess[str]:
    number = address.rpartition(".")[2]
    return subprocess.run(
        [*os.environ["LAB"].split(), verb, number, *command], capture_output=True, text=True, timeout=60
    )


def headway(*arguments: str) -> str:
    """Run `headway deploy` on this machine; returns what it prints."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "deploy", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    print(f"\nheadway deploy {arguments[0]}: {time.monotonic() - started:.1f} s")
    assert done.returncode == 0, done.stderr
    return done.stdout


def status() -> dict[str, Any]:
    done = on_host(HEAD, "bash", "-c", ". ~/.headway-env; headway deploy head status --json")
    assert done.returncode == 0, done.stderr
    state: dict[str, Any] = json.loads(done.stdout.partition("headway: ")[2])
    return state


def hosts_of(deployment: str) -> list[str]:
    """Where the running replicas of a deployment are."""
    replicas = status()["serving"]["applications"]["headway"]["deployments"][deployment]["replicas"]
    return [replica["node_ip"] for replica in replicas if replica["state"] == "RUNNING"]


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster, up with an application: deploy/ray/local.yaml with the lab's hosts, nothing to install."""
    folder = tmp_path_factory.mktemp("lab")
    document = yaml.safe_load((ROOT / "deploy/ray/local.yaml").read_text())
    document["provider"] |= {"head_ip": HEAD, "worker_ips": list(WORKERS)}
    document["auth"] = {"ssh_user": "root", "ssh_private_key": "/run/lab/id"}
    document["file_mounts"] = {"~/.ray/auth_token": "~/.ray/auth_token"}
    document["setup_commands"] = []
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        document[commands] = [
            command.replace("ray start", "ray start --object-store-memory=100000000")
            for command in document[commands]
        ]
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(document))
    application = yaml.safe_load((ROOT / "deploy/serve/cpu-demo.yaml").read_text())
    application["applications"][0] |= {
        "import_path": "cluster.bench.null_serve:build",
        "args": {
            "replicas": len(WORKERS),
            "engine": {"device": "cpu", "max_num_seqs": 2, "num_threads": 2, "kv_cache_memory": 16384},
        },
    }
    app = folder / "app.yaml"
    app.write_text(yaml.safe_dump(application))
    started = time.monotonic()
    assert headway("up", str(cluster)).startswith("headway is up: 3 hosts")
    assert headway("app", str(cluster), str(app)) == f"headway at {URL}\n"
    next(stream_events())
    print(f"from nothing to a streamed token: {time.monotonic() - started:.1f} s")
    return cluster


def stream_events() -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{URL}/v1/completions", json=BODY, timeout=60) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.usefixtures("cluster_file")
def test_every_replica_has_a_host_of_its_own() -> None:
    assert sorted(hosts_of("Replica")) == sorted(WORKERS)


def test_the_status_names_hosts_and_replicas(cluster_file: Path) -> None:
    text = headway("status", str(cluster_file))
    assert f"{WORKERS[0]}: 2 CPUs" in text
    assert text.count("headway/Replica") == 2


@pytest.mark.usefixtures("cluster_file")
def test_streams_go_on_when_a_host_dies() -> None:
    victim = next(host for host in hosts_of("Replica") if host not in hosts_of("Router"))
    finishes: list[object] = []
    started = threading.Barrier(NUM_STREAMS + 1)

    def stream() -> None:
        events = stream_events()
        next(events)
        started.wait(timeout=60)
        rest = list(events)
        finishes.append((rest[-2]["choices"][0]["finish_reason"], rest[-1]["usage"]["completion_tokens"]))

    threads = [threading.Thread(target=stream) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    started.wait(timeout=60)
    lab("cut", victim)
    for thread in threads:
        thread.join(timeout=120)
    assert finishes == [("length", BODY["max_tokens"])] * NUM_STREAMS
    lab("boot", victim)


def test_nothing_is_left_after_down(cluster_file: Path) -> None:
    assert headway("down", str(cluster_file)) == "headway is down\n"
    for host in (HEAD, *WORKERS):
        assert on_host(host, "pgrep", "-fa", "ray|haproxy|gcs").stdout == ""
