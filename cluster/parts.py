"""What production puts into the deployments: an engine over a model, and the HTTP application."""

from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.model_source import locate
from replicas.progress import Progress, silent
from replicas.pump import EnginePump
from router.app import App, build_app
from router.generation import Backend
from router.text import TextCodec


def open_app(backend: Backend, config: EngineConfig) -> App:
    """Return the HTTP application; reads the model's tokenizer and chat template from its folder."""
    return build_app(backend, TextCodec.from_folder(locate(config.model, silent).folder))


def open_pump(config: EngineConfig, progress: Progress) -> EnginePump:
    """Return a ready engine: weights loaded, kernels warm. Blocks for seconds to minutes."""
    from replicas.startup import open_runner  # torch: not for the routers' processes

    opened = open_runner(config, progress)
    engine = Engine(
        opened.resolved,
        opened.runner,
        vocab_size=opened.card.vocab_size,
        eos_token_ids=frozenset(opened.card.eos_token_ids),
    )
    return EnginePump(engine, opened.card)
