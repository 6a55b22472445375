"""Drive a bare engine with a closed load and take its times."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.api import GenerateRequest
from replicas.engine import Engine


@dataclass(slots=True)
class Drive:
    """What a closed load of `concurrency` requests at a time measured."""

    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    scheduler_us: list[float] = field(default_factory=list)
    kv_utilisation: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.output_tokens + self.prompt_tokens) / self.wall_s


def drive(
    engine: Engine,
    requests: list[GenerateRequest],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Drive:
    """Run all requests, at most `concurrency` at a time; the engine must be idle. `clock`: seconds.

    The tokens counted from outputs are checked against the engine's own counters.
    """
    result = Drive()
    todo = deque(requests)
    added_at: dict[int, float] = {}
    last_at: dict[int, float] = {}
    outputs_before, prompts_before = engine.counters.output_tokens, engine.counters.prompt_tokens
    started_at = clock()
    while todo or added_at:
        while todo and len(added_at) < concurrency:
            request = todo.popleft()
            engine.add(request, "bench")
            added_at[request.request_id] = clock()
            result.prompt_tokens += len(request.prompt_ids)
        scheduler_before = engine.counters.scheduler_s
        step_at = clock()
        outputs = engine.step()
        now = clock()
        result.step_ms.append((now - step_at) * 1e3)
        result.scheduler_us.append((engine.counters.scheduler_s - scheduler_before) * 1e6)
        result.kv_utilisation.append(engine.kv_utilisation())
        for delta in outputs.get("bench", ()):
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
            before = last_at.get(delta.request_id)
            if before is None:
                result.ttft_ms.append((now - added_at[delta.request_id]) * 1e3)
            else:
                result.itl_ms.append((now - before) * 1e3)
            last_at[delta.request_id] = now
            result.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                del added_at[delta.request_id]
    result.wall_s = clock() - started_at
    counted = engine.counters.output_tokens - outputs_before, engine.counters.prompt_tokens - prompts_before
    assert counted == (result.output_tokens, result.prompt_tokens), f"engine counted {counted}, we {result}"
    return result
