"""`headway serve` around an engine without a model: `python -m tests.e2e.null_serve CONFIG`.

The real tokenizer speaks for a NullRunner: 2 ms per step, ordinary words, never an end of its own.
"""

import sys
import time
from pathlib import Path

from cluster.cli import serve
from cluster.config import load_config
from cluster.parts import OpenedPump
from replicas.api import ModelCard
from replicas.config import EngineConfig, ModelShape, resolve
from replicas.engine import Engine
from replicas.null_runner import NullRunner
from replicas.progress import Progress
from replicas.pump import EnginePump

VOCAB_SIZE = 49152
STEP_S = 0.002
POOL_TOKENS = 16_384
"""With 1 byte per token, the pool holds so many."""


def open_null_pump(config: EngineConfig, progress: Progress) -> OpenedPump:
    progress("loading nothing", 0.5)
    shape = ModelShape(max_position_embeddings=POOL_TOKENS, kv_bytes_per_token=1, preferred_block_size=16)
    resolved = resolve(config, shape, POOL_TOKENS)
    engine = Engine(
        resolved, NullRunner(STEP_S, VOCAB_SIZE), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({2})
    )
    card = ModelCard(
        name="null",
        fingerprint="null",
        vocab_size=VOCAB_SIZE,
        max_model_len=resolved.max_model_len,
        eos_token_ids=(2,),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        replica_epoch=time.time_ns(),
    )
    return OpenedPump(pump=EnginePump(engine, card), facts=("no model",))


if __name__ == "__main__":
    # Under its importable name, so that Ray pickles the function by reference.
    from tests.e2e import null_serve

    sys.exit(serve(lambda: load_config(Path(sys.argv[1])), open_pump=null_serve.open_null_pump))
