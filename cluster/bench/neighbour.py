"""A second engine in a process of its own that decodes all the time, beside one that is measured."""

import contextlib
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from typing import Final

from cluster.bench.engine import new_engine, warm_up
from cluster.bench.workload import fixed_length_request, random_prompt
from replicas.config import EngineConfig
from replicas.progress import silent
from replicas.startup import open_runner

INPUT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 200
POLL_S: Final = 0.5


@contextlib.contextmanager
def neighbour(config: EngineConfig) -> Iterator[None]:
    """Have the neighbour decode one sequence after the other during the block."""
    spawn = multiprocessing.get_context("spawn")
    is_ready, is_over = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_decode, args=(config, is_ready, is_over), daemon=True)
    process.start()
    try:
        while not is_ready.wait(POLL_S):
            if not process.is_alive():
                raise RuntimeError(f"the neighbour ended with exit code {process.exitcode}")
        yield
    finally:
        is_over.set()
        process.join()


def _decode(config: EngineConfig, is_ready: Event, is_over: Event) -> None:
    engine = new_engine(open_runner(config, silent), "continuous")
    warm_up(engine, 1)
    is_ready.set()
    draw = random.Random(0)
    while not is_over.is_set():
        if not engine.has_work:
            engine.add(
                fixed_length_request(0, random_prompt(INPUT_TOKENS, 1000, draw), OUTPUT_TOKENS), "bench"
            )
        engine.step()
