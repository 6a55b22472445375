"""The bare engine's side of `headway bench fidelity`: arrivals served in real time, without Ray and HTTP."""

import time
from collections.abc import Sequence

import msgspec

from cluster.bench.engine import identity, new_engine, warm_up
from cluster.bench.fidelity_times import Measured, Times
from cluster.bench.report import percentile, progress
from cluster.bench.step_log import LoggedStep, log_steps
from cluster.bench.steps import deviations, fitted_profile
from cluster.bench.workload import fixed_length_request
from cluster.simulation.fit import noise_of
from cluster.simulation.traffic import Arrival
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.startup import open_runner


def measure_engine(config: EngineConfig, arrivals: Sequence[Arrival]) -> Measured:
    """Serve the arrivals with an engine in this process."""
    opened = open_runner(config, progress)
    engine = new_engine(opened, "continuous")
    warm_up(engine, config.max_num_seqs)
    log: list[LoggedStep] = []
    log_steps(engine, log.append)
    times = serve(engine, arrivals)
    profile = fitted_profile("measured", opened, log, 0.0)
    noise = noise_of(profile.steps, [step.shape for step in log], [step.seconds for step in log])
    profile = msgspec.structs.replace(profile, noise=noise)
    facts: dict[str, object] = {
        "deviation_p50": percentile(deviations(profile, log), 50),
        "deviation_p99": percentile(deviations(profile, log), 99),
        **identity(opened),
    }
    return Measured(times=times, profile=profile, delay_s=0.0, facts=facts)


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> Times:
    """Serve arrivals in real time, each when it is due; the engine must be idle."""
    times = Times()
    last_at: dict[int, float] = {}
    started_at = time.perf_counter()
    num_added = 0
    while num_added < len(arrivals) or engine.has_work:
        now = time.perf_counter() - started_at
        while num_added < len(arrivals) and arrivals[num_added].at_s <= now:
            arrival = arrivals[num_added]
            engine.add(fixed_length_request(num_added, arrival.prompt_ids, arrival.output_tokens), "bench")
            num_added += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[num_added].at_s - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - started_at
        for delta in outputs.get("bench", ()):
            due_s = arrivals[delta.request_id].at_s
            if delta.request_id in last_at:
                times.gaps_s.append(now - last_at[delta.request_id])
            else:
                times.ttft_s.append(now - due_s)
            last_at[delta.request_id] = now
            if delta.finish_reason is not None:
                times.e2e_s.append(now - due_s)
    return times
