"""Loads any decoder-only model of transformers and runs it over packed rows and a paged KV pool.

The model's own attention is replaced through transformers' AttentionInterface; everything else is theirs.
Works with transformers 5.17 and later: no cache object is passed, so its renamed argument does not matter.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from replicas.attention.base import AttentionNeeds
from replicas.errors import ModelError, UnsupportedModelError
from replicas.model_bars import report_bars
from replicas.model_source import ModelFiles
from replicas.progress import Progress

IMPLEMENTATION: Final = "headway_paged"
"""Our entry in transformers' table, where "flash", "sdpa", "flex_attention" or "/" in a name would act."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_ROWS = 4


class LayerAttention(Protocol):
    """What the attention layers of a forward pass call."""

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [rows, num_heads, head_dim]
        key: Tensor,  # [rows, num_kv_heads, head_dim]
        value: Tensor,  # as key
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor: ...  # [rows, num_heads, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what the engine must know about it."""

    module: nn.Module
    needs: AttentionNeeds
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def logits(
        self,
        token_ids: Tensor,  # [rows] int64
        positions: Tensor,  # [rows] int64
        keep: Tensor,  # [n] int64; rows whose logits are wanted
        attention: LayerAttention,
    ) -> Tensor:  # [n, vocab_size] float32
        """Run all rows through the model; the head only for the rows to keep."""
        output = self.module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            paged_attention=attention,
        )
        logits: Tensor = output.logits[0]
        return logits.float()


def load_model(
    files: ModelFiles, device: torch.device, dtype: torch.dtype | None, progress: Progress
) -> LoadedModel:
    """Load the weights and try the model once on a few tokens. `dtype` None = the checkpoint's own.

    Raises UnsupportedModelError with the reason, ModelError when the files cannot be read.
    """
    AttentionInterface.register(IMPLEMENTATION, _attention)
    config = _read_config(files)
    _check_config(config)
    return _examine(_load_module(files, device, dtype, progress), config, device)


def build_random_model(config: Any, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Build a model of transformers' `config` with random weights: for checks and benchmarks."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    _check_config(config)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    return _examine(module.eval().requires_grad_(False), config, device)


def _examine(module: nn.Module, config: Any, device: torch.device) -> LoadedModel:
    _check_class(module)
    text = config.get_text_config()
    windows = _layer_windows(text)
    return LoadedModel(
        module=module,
        needs=_observe(module, windows, device),
        vocab_size=int(text.vocab_size),
        max_position_embeddings=_max_positions(text),
        eos_token_ids=_eos_token_ids(module, text),
        dtype=next(module.parameters()).dtype,
        device=device,
    )


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, rows, head_dim]
    key: Tensor,  # [1, num_kv_heads, rows, head_dim]
    value: Tensor,  # as key
    attention_mask: Tensor | None,
    *,
    paged_attention: LayerAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend for one layer, as transformers calls it; returns [1, rows, num_heads, head_dim]."""
    extras = {
        "an attention mask": attention_mask is not None,
        "attention sinks": s_aux is not None,
        "a position bias": position_bias is not None,
        "attention that is not causal": is_causal is False,
        "values of another size than keys": key.shape != value.shape,
    }
    for extra, present in extras.items():
        if present:
            raise UnsupportedModelError(f"the model uses {extra}, which the paged path lacks")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = paged_attention(layer, query, key, value, scaling, sliding_window, softcap)
    return out[None], None


def _read_config(files: ModelFiles) -> Any:
    try:
        return AutoConfig.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"model {files.name!r}: config.json: {_one_line(error)}") from error


def _check_config(config: Any) -> None:
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder model; only decoders are served"
        )
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if foreign:
        raise UnsupportedModelError(f"{text.model_type} has layers of type {', '.join(foreign)}")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):
        if parameters.get("rope_type") == "dynamic":
            raise UnsupportedModelError(
                f"{text.model_type} uses rope_type dynamic: a row's rotation would depend on its batch"
            )


def _load_module(
    files: ModelFiles, device: torch.device, dtype: torch.dtype | None, progress: Progress
) -> nn.Module:
    try:
        with report_bars("loading weights", progress):
            module, info = AutoModelForCausalLM.from_pretrained(
                files.folder,
                dtype=dtype or "auto",
                attn_implementation=IMPLEMENTATION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                device_map=None if device.type == "cpu" else device,
            )
    except Exception as error:  # config and weight files decide what the loaders raise
        raise ModelError(f"model {files.name!r} cannot be loaded: {_one_line(error)}") from error
    wrong = sorted({*info["missing_keys"], *(str(entry) for entry in info["mismatched_keys"])})
    if wrong:
        raise ModelError(
            f"model {files.name!r}: {len(wrong)} weights are missing or misshapen, first {wrong[0]}"
        )
    model: nn.Module = module
    return model.eval().requires_grad_(False)


def _check_class(module: nn.Module) -> None:
    name = type(module).__name__
    compatible = getattr(type(module), "is_backend_compatible", None)
    if compatible is None or not compatible():
        raise UnsupportedModelError(f"{name} does not let its attention be replaced")
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModelError(f"{name} cannot compute logits for chosen rows only (logits_to_keep)")


def _layer_windows(text: Any) -> dict[int, int]:
    """Windows by layer as the config has them, for classes that leave sliding to the mask."""
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None) or ()
    return {i: window for i, kind in enumerate(layer_types) if kind == "sliding_attention" and window}


class _Observer:
    """Notes what each layer asks of its attention, and answers zeros."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[int, ...]] = {}
        self.windows: dict[int, int | None] = {}
        self.softcap = False

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002 - LayerAttention
        scaling: float,  # noqa: ARG002
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.heads[layer] = (query.shape[1], key.shape[1], key.shape[2])
        self.windows[layer] = window
        self.softcap |= softcap is not None
        return torch.zeros_like(query, memory_format=torch.contiguous_format)


def _observe(module: nn.Module, windows: dict[int, int], device: torch.device) -> AttentionNeeds:
    """Call the model once: what it does counts, not what its config promises."""
    observer = _Observer()
    ids = torch.arange(_PROBE_ROWS, device=device)
    try:
        with torch.inference_mode():
            module(
                input_ids=ids[None] % 2,
                position_ids=ids[None],
                use_cache=False,
                logits_to_keep=ids[-1:],
                paged_attention=observer,
            )
    except UnsupportedModelError:
        raise
    except Exception as error:  # any failure of foreign modelling code means the same here
        raise UnsupportedModelError(
            f"{type(module).__name__} does not run over a paged cache: {_one_line(error)}"
        ) from error
    shapes = set(observer.heads.values())
    if len(shapes) != 1 or sorted(observer.heads) != list(range(len(observer.heads))):
        raise UnsupportedModelError(
            f"{type(module).__name__}: the paged path needs equal heads in all layers, not {sorted(shapes)}"
        )
    num_heads, num_kv_heads, head_dim = shapes.pop()
    return AttentionNeeds(
        num_layers=len(observer.heads),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=tuple(observer.windows[i] or windows.get(i) for i in range(len(observer.heads))),
        softcap=observer.softcap,
    )


def _max_positions(text: Any) -> int:
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        raise UnsupportedModelError(f"{text.model_type}: config.json gives no max_position_embeddings")
    return int(positions)


def _eos_token_ids(module: nn.Module, text: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (getattr(module, "generation_config", None), text):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, Iterable) else (ids,))
    return tuple(sorted(found))


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text[:300]
