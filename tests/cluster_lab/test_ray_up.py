"""`headway deploy` on four hosts: `ray up`, an application, the drain of a host, the end of one, `down`."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.server import ROOT

pytestmark = pytest.mark.skipif("LAB" not in os.environ, reason="needs several hosts: make test-cluster")

HEAD = "10.77.0.1"
URL = f"http://{HEAD}:8000"
WORKERS = ("10.77.0.2", "10.77.0.3", "10.77.0.4")
"""One more than there are replicas."""
NUM_REPLICAS = 2
NUM_SEATS = 6
"""Of each replica: one alone can take all streams."""
NUM_STREAMS = 5
"""Some on either replica."""
BODY = {"model": "null", "prompt": "once", "stream": True, "stream_options": {"include_usage": True}}


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
            "replicas": NUM_REPLICAS,
            "engine": {
                "device": "cpu",
                "max_num_seqs": NUM_SEATS,
                "num_threads": 2,
                "kv_cache_memory": 262_144,
            },
        },
    }
    app = folder / "app.yaml"
    app.write_text(yaml.safe_dump(application))
    started = time.monotonic()
    assert headway("up", str(cluster)).startswith("headway is up: 4 hosts")
    assert headway("app", str(cluster), str(app)) == f"headway at {URL}\n"
    next(stream_events(1))
    print(f"from nothing to a streamed token: {time.monotonic() - started:.1f} s")
    return cluster


def stream_events(max_tokens: int) -> Iterator[dict[str, Any]]:
    body = BODY | {"max_tokens": max_tokens}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def whole_streams(max_tokens: int) -> Iterator[None]:
    """Streams that have begun when the block does, and that end whole and alike, whatever happens in it.

    A token of this model depends on its position alone; those on a replica that stays are not interrupted.
    """
    texts: list[str] = []
    started = threading.Barrier(NUM_STREAMS + 1)

    def stream() -> None:
        events = stream_events(max_tokens)
        first = next(events)
        started.wait(timeout=60)
        *deltas, last, usage = [first, *events]
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == max_tokens
        texts.append("".join(event["choices"][0]["text"] for event in (*deltas, last)))

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(stream) for _ in range(NUM_STREAMS)]
        started.wait(timeout=60)
        yield
        for running in streams:
            running.result()
    assert (len(texts), len(set(texts))) == (NUM_STREAMS, 1)


@contextlib.contextmanager
def answered_requests() -> Iterator[None]:
    """Requests one after the other while the block runs, each of which is answered."""
    body = {"model": "null", "prompt": "once", "max_tokens": 5}
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.5):
            statuses.append(httpx.post(f"{URL}/v1/completions", json=body, timeout=60).status_code)

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        try:
            yield
        finally:
            is_over.set()
        asking.result()
    assert set(statuses) == {200}


def announce_end(host: str, deadline_s: int) -> None:
    """Have Ray drain a host, as whoever hears that it will be taken away."""
    (node,) = [entry["node_id"] for entry in status()["hosts"] if entry["address"] == host]
    done = on_host(
        HEAD,
        *("bash", "-c", '. ~/.headway-env; ray drain-node "$@"', "drain", "--address", f"{HEAD}:6379"),
        *("--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"),
        *("--deadline-remaining-seconds", str(deadline_s)),
    )
    assert done.returncode == 0, done.stderr


def host_without_router() -> str:
    """One whose only connections are a replica's."""
    return next(host for host in hosts_of("Replica") if host not in hosts_of("Router"))


@pytest.mark.usefixtures("cluster_file")
def test_every_replica_has_a_host_of_its_own() -> None:
    hosts = hosts_of("Replica")
    assert (len(set(hosts)), set(hosts) <= set(WORKERS)) == (NUM_REPLICAS, True)


def test_the_status_names_hosts_and_replicas(cluster_file: Path) -> None:
    text = headway("status", str(cluster_file))
    assert f"{WORKERS[0]}: 2 CPUs" in text
    assert text.count("headway/Replica") == NUM_REPLICAS


def test_a_drained_host_loses_its_replica_and_no_stream(cluster_file: Path) -> None:
    host = host_without_router()
    with whole_streams(16_000), answered_requests():
        assert headway("drain", str(cluster_file), host) == f"{host} runs no replica\n"
        assert len(set(hosts_of("Replica")) - {host}) == NUM_REPLICAS


@pytest.mark.usefixtures("cluster_file")
def test_streams_go_on_when_a_host_dies_while_it_drains() -> None:
    host = host_without_router()
    with whole_streams(8000), answered_requests():
        announce_end(host, deadline_s=1)
        lab("cut", host)
    lab("boot", host)


def test_nothing_is_left_after_down(cluster_file: Path) -> None:
    assert headway("down", str(cluster_file)) == "headway is down\n"
    for host in (HEAD, *WORKERS):
        assert on_host(host, "pgrep", "-fa", "ray|haproxy|gcs").stdout == ""
