"""What production puts into the deployments: an engine over a model, and the HTTP application."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from cluster.metrics.router import RouterFigures
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.model_source import locate
from replicas.progress import Progress, silent
from replicas.pump import EnginePump
from router.access_log import AccessSink, AccessWriter, nowhere
from router.app import App, build_app
from router.callers import Identify
from router.limits import Limits
from router.text import TextCodec
from router.tracing import Tracing
from router.ui import Ui


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPump:
    """A ready engine, not yet started."""

    pump: EnginePump
    device: str = "cpu"
    facts: tuple[str, ...] = ()
    """For the start-up line: how this engine runs, a few words each."""


OpenPump = Callable[[EngineConfig, Progress], OpenedPump]
"""Builds an engine; blocks for seconds to minutes. A function that every node can import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Who may ask for how much, and who is told of it."""

    identify: Identify
    limits: Limits
    access: AccessSink
    tracing: Tracing


def open_app(figures: RouterFigures, config: EngineConfig, gate: Gate, ui: Ui) -> App:
    """Return the HTTP application; reads the model's tokenizer and chat template from its folder."""
    text = TextCodec.from_folder(locate(config.model, silent).folder)
    return build_app(
        figures.backend,
        text,
        identify=gate.identify,
        limits=gate.limits,
        access=gate.access,
        stats=figures.stats,
        measures=figures.measures,
        ui=ui,
        tracing=gate.tracing,
    )


def open_access_log(target: str) -> AccessSink:
    """Return the access log for `access.log` of the configuration."""
    if target == "off":
        return nowhere
    if target == "stdout":
        return AccessWriter(os.fdopen(os.dup(1), "wb", buffering=0))
    return AccessWriter(open(target, "ab", buffering=0))


def open_pump(config: EngineConfig, progress: Progress) -> OpenedPump:
    """Return an engine over the configured model: weights loaded, kernels warm."""
    from replicas.startup import open_runner  # torch: not for the routers' processes

    opened = open_runner(config, progress)
    engine = Engine(
        opened.resolved,
        opened.runner,
        vocab_size=opened.card.vocab_size,
        eos_token_ids=frozenset(opened.card.eos_token_ids),
        prepare=opened.runner.prepare,
    )
    attention = f"attention {opened.attention}{' with CUDA graphs' if opened.cuda_graphs else ''}"
    threads = f"{opened.num_threads} thread{'s' if opened.num_threads > 1 else ''}"
    return OpenedPump(
        pump=EnginePump(engine, opened.card),
        device=opened.device,
        facts=(f"numerics {opened.numerics}", f"quantization {opened.quantization}", attention, threads),
    )
