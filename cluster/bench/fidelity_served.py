"""The side of `headway bench fidelity` that is served: replicas behind Ray Serve, and a client over HTTP."""

import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cluster.bench.fidelity_times import Measured, Times
from cluster.bench.http_replay import Replayed, replay_http
from cluster.bench.logged_serve import read_logs
from cluster.bench.report import progress
from cluster.bench.server import running_server, served_model
from cluster.bench.shared_fit import SharedFit, fit_shared, time_beside
from cluster.bench.step_log import LoggedStep
from cluster.config import ClusterConfig
from cluster.simulation.profile import Profile, SharedHost
from cluster.simulation.traffic import Arrival, prompt

WARM_TOKENS: Final = 64
NUM_LONE: Final = 20
LONE_EVERY_S: Final = 0.5


def measure_served(config: ClusterConfig, arrivals: Sequence[Arrival], seed: int) -> Measured:
    """Serve the arrivals with replicas that share this machine; the client runs here, too."""
    document = json.loads(msgspec.json.encode({"engine": config.engine, "tiers": config.tiers}))
    with tempfile.TemporaryDirectory() as folder:
        command = ["cluster.bench.logged_serve", folder]
        with running_server(document | {"replicas": config.replicas}, command) as server:
            model = served_model(server.url)
            seats = config.replicas * config.engine.max_num_seqs
            # Other prompts each time: none may be in the prefix cache.
            replay_http(server.url, model, [_short(0.0)] * seats, seed + 1)
            progress("warm; now lone requests")
            shorts = [_short(i * LONE_EVERY_S) for i in range(NUM_LONE)]
            lone = replay_http(server.url, model, shorts, seed + 2)
            progress("now the arrivals")
            replayed = replay_http(server.url, model, arrivals, seed)
        logs = read_logs(Path(folder))
    delay_s = statistics.median(delays(lone, logs))
    logs = [[step for step in log if step.ended_at > lone[0].due_at] for log in logs]
    fit = fit_shared(logs)
    beside = sum(time_beside(logs, number)[:, 1:].sum() for number in range(len(logs)))
    busy = sum(step.seconds for log in logs for step in log)
    times = times_of(replayed)
    num_tokens = sum(arrival.output_tokens for arrival in arrivals)
    facts: dict[str, object] = {
        "delay_ms": delay_s * 1e3,
        "slowdown": fit.slowdown,
        "mean_deviation": fit.error,
        "beside_fraction": float(beside / busy),
        "busy_fraction": busy / config.replicas / (replayed[-1].answer.done_at - replayed[0].due_at),
        "events_per_token": (len(times.gaps_s) + len(arrivals)) / num_tokens,
        "steps": [len(log) for log in logs],
        "model": model,
        "num_threads": config.engine.num_threads,
    }
    return Measured(times=times, profile=_profile(config, fit), delay_s=delay_s, facts=facts)


def times_of(replayed: Sequence[Replayed]) -> Times:
    """Return what a client saw; an event that brings several tokens is one gap."""
    return Times(
        ttft_s=[one.answer.output_at[0] - one.due_at for one in replayed],
        e2e_s=[one.answer.done_at - one.due_at for one in replayed],
        gaps_s=[
            later - earlier for one in replayed for earlier, later in itertools.pairwise(one.answer.output_at)
        ],
    )


def delays(lone: Sequence[Replayed], logs: Sequence[Sequence[LoggedStep]]) -> list[float]:
    """Return for each of the requests, of which no two were open at a time, the part of its TTFT in which no
    engine was in a step."""
    steps = [step for log in logs for step in log]
    found = []
    for one in lone:
        first_at = one.answer.output_at[0]
        in_steps = sum(step.seconds for step in steps if one.due_at < step.ended_at <= first_at)
        found.append(first_at - one.due_at - in_steps)
    return found


def _short(at_s: float) -> Arrival:
    ids = prompt([1], WARM_TOKENS, WARM_TOKENS)
    return Arrival(at_s=at_s, tier=0, client="", prompt_ids=ids, output_tokens=4)


def _profile(config: ClusterConfig, fit: SharedFit) -> Profile:
    """Memory is as much as all seats can need: the real pool is larger, and neither binds."""
    seats, tokens = config.engine.max_num_seqs, config.engine.max_model_len
    assert tokens is not None
    shared = SharedHost(replicas=config.replicas, slowdown=fit.slowdown) if config.replicas > 1 else None
    return Profile(
        name="measured",
        source="fitted by bench fidelity",
        steps=fit.steps,
        max_position_embeddings=tokens,
        kv_bytes_per_token=1,
        kv_bytes=seats * tokens,
        block_size=16,
        cold_start_s=0.0,
        shared_host=shared,
        noise=fit.noise,
    )
