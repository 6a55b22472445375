"""open_runner: from a configuration to a runner that is warm and whose numerics are proved."""

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import Final

from replicas.api import ModelCard
from replicas.attention import choose_backend
from replicas.attention.base import AttentionBackend, GraphableAttention, KVPoolSpec
from replicas.config import (
    DEFAULT_CPU_KV_FRACTION,
    MAX_CPU_KV_BYTES,
    EngineConfig,
    ModelShape,
    Numerics,
    Quantization,
    ResolvedConfig,
    resolve,
)
from replicas.constraints import Constraints
from replicas.cuda_graphs import CudaRecorder, Recorder
from replicas.errors import ConfigError
from replicas.hardware import available_cpus, available_memory_bytes
from replicas.model import LoadedModel, load_model
from replicas.model_adapt import adapt
from replicas.model_device import choose_device, choose_dtype, set_num_threads
from replicas.model_digest import files_digest
from replicas.model_pass import open_pass
from replicas.model_profile import kv_budget, measure_memory
from replicas.model_source import ModelFiles, locate
from replicas.probe import probe
from replicas.process_memory import return_memory
from replicas.progress import Progress, silent
from replicas.runner import TorchRunner
from replicas.runner_ahead import AheadRunner

_MIB: Final = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRunner:
    """A runner ready for its first step, and all that others must know about it."""

    runner: TorchRunner
    resolved: ResolvedConfig
    card: ModelCard
    files: ModelFiles
    numerics: Numerics
    """What holds in fact: `fast` where exactness was not asked for and the model does not have it."""
    attention: str
    """Name of the attention backend."""
    cuda_graphs: bool
    """Decodes are replayed from graphs."""
    quantization: Quantization
    num_threads: int
    device: str
    """Its kind: cpu or cuda."""


def open_runner(config: EngineConfig, progress: Progress = silent) -> OpenedRunner:
    """Find and load the model, size and allocate the KV pool, warm up, prove the numerics.

    Raises ConfigError or ModelError with one line for the user.
    """
    num_threads = config.num_threads or available_cpus()
    set_num_threads(num_threads)
    files = locate(config.model, progress)
    device = choose_device(config)
    if config.num_speculative_tokens and device.type != "cpu":
        raise ConfigError(f"num_speculative_tokens: on CPU only, not on {device.type}")
    if device.type == "cpu":
        _check_memory(files)
    model = load_model(files, device, choose_dtype(config, device), progress)
    backend_class = choose_backend(config.attention, device, model.dtype, model.needs)
    numerics = _wanted_numerics(config, model, backend_class)
    resolved = _size(config, model, backend_class)

    adapted = adapt(model, config.quantization, numerics, files.folder, resolved.max_model_len, progress)
    return_memory(files.weights)
    progress("warming up", None)
    spec = KVPoolSpec(
        needs=model.needs,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        dtype=model.dtype,
        device=device,
        num_threads=num_threads,
    )
    backend = backend_class(spec)
    if device.type == "cpu" and resolved.has_itl_target:
        take_memory(backend)
    runner = _new_runner(files, model, backend, resolved.block_size, adapted.row_floor)
    results = probe(runner.logit_bytes, resolved, model.vocab_size)
    if numerics == "exact" and len(set(results)) > 1:
        if config.numerics == "exact":
            raise ConfigError(
                "numerics exact: this model's logits depend on the batch on this machine; use numerics fast"
            )
        numerics = "fast"
    has_graphs = False
    if isinstance(runner, AheadRunner) and isinstance(backend, GraphableAttention) and config.cuda_graphs:
        progress("recording CUDA graphs", None)
        has_graphs = record_or_warn(runner, CudaRecorder(), resolved)
    return OpenedRunner(
        runner=runner,
        resolved=resolved,
        card=_card(
            files, model, resolved, _fingerprint(files, model, adapted.quantization, numerics, results)
        ),
        files=files,
        numerics=numerics,
        attention=backend_class.name,
        cuda_graphs=has_graphs,
        quantization=adapted.quantization,
        num_threads=num_threads,
        device=device.type,
    )


def _new_runner(
    files: ModelFiles, model: LoadedModel, backend: AttentionBackend, block_size: int, row_floor: int
) -> TorchRunner:
    constraints = Constraints.from_folder(files.folder, model.vocab_size, model.eos_token_ids)
    if model.device.type == "cuda":
        return AheadRunner(model, backend, constraints, block_size=block_size, row_floor=row_floor)
    return TorchRunner(
        model,
        backend,
        constraints,
        block_size=block_size,
        row_floor=row_floor,
        whole_pass=open_pass(model, backend),
    )


def take_memory(backend: AttentionBackend) -> None:
    """Write to all of the KV pool. What memory it lacks, steps would have to wait for: up to 4 ms a page."""
    for pool in backend.pools:
        pool.zero_()


def _check_memory(files: ModelFiles) -> None:
    weights = sum(path.stat().st_size for path in files.weights)
    available = available_memory_bytes()
    if weights > available:
        raise ConfigError(
            f"model {files.name!r} needs {weights // _MIB} MiB for its weights, "
            f"but only {available // _MIB} MiB are available"
        )


def _wanted_numerics(config: EngineConfig, model: LoadedModel, backend: type[AttentionBackend]) -> Numerics:
    possible = model.device.type == "cpu" and backend.batch_invariant
    if config.numerics == "exact" and not possible:
        raise ConfigError(f"numerics exact: not offered by {backend.name} on {model.device.type}")
    return config.numerics or ("exact" if possible else "fast")


def _size(config: EngineConfig, model: LoadedModel, backend: type[AttentionBackend]) -> ResolvedConfig:
    shape = ModelShape(
        max_position_embeddings=model.max_position_embeddings,
        kv_bytes_per_token=backend.kv_bytes_per_token(model.needs, model.dtype),
        preferred_block_size=backend.preferred_block_size,
    )
    resolved = resolve(config, shape, _kv_bytes(config, model))
    if resolved.block_size % backend.block_size_multiple:
        raise ConfigError(
            f"block_size {resolved.block_size}: attention backend {backend.name} "
            f"needs a multiple of {backend.block_size_multiple}"
        )
    return resolved


def _kv_bytes(config: EngineConfig, model: LoadedModel) -> int:
    if model.device.type == "cuda":
        if config.kv_cache_memory is not None:
            return config.kv_cache_memory
        memory = measure_memory(model, config.max_num_batched_tokens, config.max_num_seqs)
        return kv_budget(memory, config.gpu_memory_utilization)
    available = available_memory_bytes()
    if config.kv_cache_memory is None:
        return min(MAX_CPU_KV_BYTES, int(available * DEFAULT_CPU_KV_FRACTION))
    if config.kv_cache_memory > available:
        raise ConfigError(
            f"kv_cache_memory {config.kv_cache_memory} ({config.kv_cache_memory // _MIB} MiB) is more than "
            f"the {available // _MIB} MiB that are available"
        )
    return config.kv_cache_memory


def record_or_warn(runner: AheadRunner, recorder: Recorder, resolved: ResolvedConfig) -> bool:
    """Record the runner's decodes; False, and a line in the log, where the model does not allow it."""
    try:
        runner.record_graphs(recorder, resolved.max_num_seqs, resolved.max_model_len)
    except RuntimeError as error:  # the model asks the device something in the middle of its pass
        logger.warning("no CUDA graphs for this model: %s", str(error).partition("\n")[0])
        return False
    return True


def _fingerprint(
    files: ModelFiles,
    model: LoadedModel,
    quantization: Quantization,
    numerics: Numerics,
    results: list[bytes],
) -> str:
    """Hash weights, format and the bits of a fixed prompt's logits: CPUs and libraries differ in those."""
    digest = hashlib.sha256(files_digest(files.folder, files.weights))
    digest.update(f"{model.dtype} {quantization} {numerics}".encode())
    for result in results:
        digest.update(result)
    return digest.hexdigest()[:32]


def _card(files: ModelFiles, model: LoadedModel, resolved: ResolvedConfig, fingerprint: str) -> ModelCard:
    return ModelCard(
        name=files.name,
        fingerprint=fingerprint,
        vocab_size=model.vocab_size,
        max_model_len=resolved.max_model_len,
        eos_token_ids=model.eos_token_ids,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        replica_epoch=int.from_bytes(os.urandom(6)) + 1,
        takes_seats=resolved.takes_seats,
    )
