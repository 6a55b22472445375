"""Streams outlive the replica that began them: nothing missing, nothing twice, the same answer."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, start_model, start_null

pytestmark = pytest.mark.e2e

NUM_STREAMS = 32
REPLICA = "ServeReplica:headway:Replica"
NOTHING: Mapping[int, int] = {}


def stream(server: Server, body: dict[str, Any], began: threading.Semaphore) -> list[dict[str, Any]]:
    """All events of a streamed completion but [DONE], which must come; tells when the first is there."""
    events: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for line in lines:
            if not events:
                began.release()
            events.append(line)
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


def answers(
    server: Server, bodies: Sequence[dict[str, Any]], *, signals: Mapping[int, int] = NOTHING
) -> list[Any]:
    """What each stream brought: text, logprobs and finish; sends signals to processes once all have begun."""
    began = threading.Semaphore(0)

    def run(body: dict[str, Any]) -> dict[str, Any]:
        choices = [choice for event in stream(server, body, began) for choice in event["choices"]]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        return {
            "text": "".join(choice["text"] for choice in choices),
            "tokens": [token for entry in logprobs for token in entry["tokens"]],
            "logprobs": [value for entry in logprobs for value in entry["token_logprobs"]],
            "finishes": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        }

    with ThreadPoolExecutor(len(bodies)) as threads:
        streams = [threads.submit(run, body) for body in bodies]
        if signals:
            for _ in bodies:
                assert began.acquire(timeout=60)
        for pid, number in signals.items():
            os.kill(pid, number)
        return [stream.result() for stream in streams]


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of the bundled model, exact numerics."""
    server = start_model(
        tmp_path_factory.mktemp("model"),
        "replicas: 2\nengine: {max_num_seqs: 32, num_threads: 1, kv_cache_memory: 268435456}\n",
    )
    yield server
    assert server.stop() == 0


def model_bodies() -> list[dict[str, Any]]:
    """Every kind of parameter that looks at earlier output, and draws with and without a temperature."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 5, "logprobs": 2},
        {"seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"seed": 7, "repetition_penalty": 1.3, "min_tokens": 14},
    ]
    return [
        {"prompt": f"Story number {i}:", "max_tokens": 16, "stream": True, **kinds[i % len(kinds)]}
        for i in range(NUM_STREAMS)
    ]


def test_streams_of_a_killed_replica_end_as_if_nothing_had_happened(model_server: Server) -> None:
    bodies = model_bodies()
    undisturbed = answers(model_server, bodies)
    assert all(answer["finishes"] in (["length"], ["stop"]) for answer in undisturbed)
    victim = model_server.processes(REPLICA)[0]
    assert answers(model_server, bodies, signals={victim: signal.SIGKILL}) == undisturbed


@pytest.fixture(scope="module")
def lone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One replica without a model: its streams must wait until it is replaced."""
    server = start_null(tmp_path_factory.mktemp("lone"), "engine: {max_num_seqs: 4}\n")
    yield server
    assert server.stop() == 0


def test_streams_wait_for_the_successor_of_their_replica(lone_server: Server) -> None:
    body = {"prompt": "once", "max_tokens": 1500, "stream": True}
    (undisturbed,) = answers(lone_server, [body])
    (victim,) = lone_server.processes(REPLICA)
    assert answers(lone_server, [body] * 4, signals={victim: signal.SIGKILL}) == [undisturbed] * 4
    assert undisturbed["finishes"] == ["length"]


def test_streams_of_a_frozen_replica_go_on_elsewhere_and_its_awakening_changes_nothing(
    server: Server,
) -> None:
    body = {"prompt": "once", "max_tokens": 2000, "stream": True}
    (undisturbed,) = answers(server, [body])
    frozen, _ = server.processes(REPLICA)
    try:
        disturbed = answers(server, [body] * 4, signals={frozen: signal.SIGSTOP})
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert disturbed == [undisturbed] * 4
    assert answers(server, [body] * 4) == [undisturbed] * 4
