"""Random models small enough to build in a test, one per kind of architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

VOCAB_SIZE = 160
WINDOW = 12
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama() -> PreTrainedConfig:
    return LlamaConfig(**COMMON, num_hidden_layers=3, tie_word_embeddings=True)


def qwen3() -> PreTrainedConfig:
    return Qwen3Config(**COMMON, num_hidden_layers=2)


def mistral() -> PreTrainedConfig:
    return MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=WINDOW)


def gemma2() -> PreTrainedConfig:
    """Soft caps on scores and logits, and a window in every other layer."""
    return Gemma2Config(**COMMON, num_hidden_layers=2, sliding_window=WINDOW, query_pre_attn_scalar=16)


def gemma3() -> PreTrainedConfig:
    """A window in one layer, another rotary base in each kind of layer."""
    return Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=2,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3": gemma3,
}


def save(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a model with random weights, large enough for its logits to differ clearly."""
    torch.manual_seed(7)
    config.initializer_range = 0.2
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # found, never read here
    return folder


def reference_tokens(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' own generate answers, greedy."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
