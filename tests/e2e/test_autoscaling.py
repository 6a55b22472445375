"""Replicas come with the load and go with it, down to none and back; no stream notices."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import ROOT, Server, start_null, wait_for

pytestmark = pytest.mark.e2e

REPLICA = "ServeReplica:headway:Replica"
CONFIG = """
autoscaling: {min_replicas: 0, max_replicas: 3, interval_s: 0.5, demand_span_s: 2,
              downscale_delay_s: 3, to_zero_delay_s: 6}
tiers: [{name: only, level: 0, ttft_target_ms: 100000}]
drain_s: 3
max_surge_percent: 100
engine: {max_num_seqs: 2, num_threads: 1, kv_cache_memory: 32768}
"""
"""Two seats and steps of 2 ms: a replica does 1,000 tokens a second. A stream longer than `drain_s` must go
on elsewhere when its replica goes."""
LOAD = ["--rate", "7", "--duration-s", "10", "--input-tokens", "16", "--output-tokens", "400", "--ignore-eos"]
"""2,800 tokens a second."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_null(tmp_path_factory.mktemp("scaled"), CONFIG)
    yield server
    assert server.stop() == 0


def decisions(server: Server) -> list[dict[str, Any]]:
    """What the policy has logged, oldest first."""
    (log,) = Path(server.folder()).glob("ray/session_2*/logs/serve/controller_*.log")
    whole_lines = log.read_text().rpartition("\n")[0].splitlines()
    lines = [line for line in whole_lines if '"event": "autoscaling"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def wait_for_target(server: Server, target: int) -> None:
    def is_decided() -> bool | None:
        made = decisions(server)
        return (bool(made) and made[-1]["target"] == target) or None

    wait_for(is_decided, f"a target of {target}")


class LongStream:
    """Ten seconds of one answer and more."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._finishes: list[str | None] = []
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._began.wait(60)

    def _read(self) -> None:
        body = {"model": "null", "prompt": "once", "max_tokens": 6000, "ignore_eos": True, "stream": True}
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=90) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._finishes.append(json.loads(line[6:])["choices"][0]["finish_reason"])
                    self._began.set()

    def finish(self) -> str | None:
        """Wait for its end; return why it ended."""
        self._thread.join(timeout=90)
        return self._finishes[-1]


def test_one_to_three_to_none_and_back_without_a_failed_stream(scaled: Server) -> None:
    command = [sys.executable, "-m", "load", "run", "--url", scaled.url, *LOAD, "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as load:
        wait_for_target(scaled, 3)
        long = LongStream(scaled)
        output, _ = load.communicate(timeout=120)
    report = json.loads(output)
    assert (report["errors"], report["requests"] > 40) == ({}, True)
    wait_for_target(scaled, 1)
    assert long.finish() == "length"  # whatever replica it began on
    wait_for_target(scaled, 0)
    made = decisions(scaled)
    changes = [line for line in made if line["target"] != line["before"]]
    assert [line["target"] for line in changes][-4:] == [3, 2, 1, 0]
    for line in changes:
        codes = {reason["code"] for reason in line["reasons"]}
        assert codes & {"rate", "queue", "itl"} if line["target"] > line["before"] else codes == {"less"}
    wait_for(lambda: scaled.processes(REPLICA) == [] or None, "none to be left")
    body = {"model": "null", "prompt": "x", "max_tokens": 5}
    answer = httpx.post(f"{scaled.url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200


def test_a_rolling_update_ends_no_stream_and_leaves_no_request_without_an_answer(scaled: Server) -> None:
    before = set(scaled.processes(REPLICA))
    long = LongStream(scaled)
    config = scaled.config.read_text()
    scaled.config.write_text(config.replace("max_num_seqs: 2", "max_num_seqs: 3"))
    with ThreadPoolExecutor(1) as threads:
        is_over = threading.Event()
        statuses = threads.submit(ask_until, is_over, scaled)
        try:
            scaled.deploy(1)
            wait_for(lambda: set(scaled.processes(REPLICA)) - before or None, "a replica of the new kind")
            assert long.finish() == "length"
            wait_for(lambda: not set(scaled.processes(REPLICA)) & before or None, "the end of the old one")
        finally:
            is_over.set()
    assert set(statuses.result()) == {200}


def ask_until(is_over: threading.Event, server: Server) -> list[int]:
    """Ask for a few tokens again and again; returns the status of every answer."""
    body = {"model": "null", "prompt": "x", "max_tokens": 5}
    statuses = []
    while not is_over.wait(0.2):
        statuses.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=90).status_code)
    return statuses
