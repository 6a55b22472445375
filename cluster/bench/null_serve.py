"""`headway serve` around an engine without a model: `python -m cluster.bench.null_serve CONFIG [ADDRESS]`.

On a cluster of several hosts, `serve deploy` takes `cluster.bench.null_serve:build`.

Everything is real but the forward pass: HTTP, Ray, router, tokenizer, wire, scheduler. A step takes
2 ms, spent asleep as on a GPU; tokens are ordinary words, never an end.
"""

import os
import sys
from pathlib import Path
from typing import Any

from cluster.cli import reported, serve
from cluster.config import load_config, parse_config
from cluster.parts import OpenedPump, OpenPump
from replicas.api import ModelCard
from replicas.config import EngineConfig, ModelShape, resolve
from replicas.engine import Engine
from replicas.null_runner import NullRunner
from replicas.progress import Progress
from replicas.pump import EnginePump

STEP_S = 0.002
VOCAB_SIZE = 49152
"""The bundled model's; its tokenizer speaks for the runner."""
EOS_TOKEN_ID = 2
MAX_MODEL_LEN = 32_768
"""Long enough for streams that last while hosts come and go."""
MAX_POOL_TOKENS = 524_288
"""At one byte per token, `kv_cache_memory` is the pool in tokens; this many by default."""


def open_null_pump(config: EngineConfig, progress: Progress) -> OpenedPump:
    """Return an engine around a NullRunner, sized by `config`."""
    progress("loading nothing", 0.5)
    shape = ModelShape(max_position_embeddings=MAX_MODEL_LEN, kv_bytes_per_token=1, preferred_block_size=16)
    resolved = resolve(config, shape, config.kv_cache_memory or MAX_POOL_TOKENS)
    runner = NullRunner(STEP_S, VOCAB_SIZE)
    engine = Engine(resolved, runner, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_TOKEN_ID}))
    card = ModelCard(
        name="null",
        fingerprint="null",
        vocab_size=VOCAB_SIZE,
        max_model_len=resolved.max_model_len,
        eos_token_ids=(EOS_TOKEN_ID,),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        replica_epoch=int.from_bytes(os.urandom(6)) + 1,
    )
    return OpenedPump(pump=EnginePump(engine, card), facts=("no model",))


def build(arguments: dict[str, Any]) -> Any:
    """Return the Serve application for a config document, as `cluster.app:build`, but without a model."""
    from cluster.app import application

    return application(parse_config(arguments), _importable())


def _importable() -> OpenPump:
    """The function under its importable name, so that Ray pickles it by reference."""
    from cluster.bench import null_serve

    return null_serve.open_null_pump


if __name__ == "__main__":
    config_file, address = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    sys.exit(
        reported(lambda: serve(lambda: load_config(config_file), address=address, open_pump=_importable()))
    )
