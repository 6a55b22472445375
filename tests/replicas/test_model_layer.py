from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from replicas.model import LoadedModel, load_model
from replicas.model_layer import FusedLayer, fuse_layers
from replicas.model_smooth import InputPeaks
from replicas.model_source import ModelFiles
from replicas.progress import silent
from tests.replicas.tiny_models import COMMON, MODELS, save

FUSED = {"llama": 3, "qwen3": 2, "mistral": 2, "gemma2": 0, "gemma3": 0}
ROWS = 20


def load(folder: Path) -> LoadedModel:
    return load_model(ModelFiles(name="tiny", folder=folder), torch.device("cpu"), torch.float32, silent)


def attend(_: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, *_rest: Any) -> Tensor:
    heads = [x.transpose(0, 1)[None] for x in (query, key, value)]
    out = nn.functional.scaled_dot_product_attention(
        heads[0], heads[1], heads[2], is_causal=True, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1).contiguous()


def logits(model: LoadedModel) -> Tensor:
    rows = torch.arange(ROWS)
    with torch.inference_mode():
        return model.logits(rows * 7 % 150, rows, rows, attend)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_the_llama_kind_are_fused_and_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model = load(save(MODELS[name](), tmp_path))
    before = logits(model)
    assert fuse_layers(model.module) == FUSED[name]
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**COMMON, num_hidden_layers=1, attention_bias=True, mlp_bias=True),
        Qwen2Config(**{k: v for k, v in COMMON.items() if k != "head_dim"}, num_hidden_layers=1),
    ],
    ids=["llama", "qwen2"],
)
def test_biases_are_kept(config: Any, tmp_path: Path) -> None:
    model = load(save(config, tmp_path))
    for name, parameter in model.module.named_parameters():
        if name.endswith("bias"):
            parameter.fill_(0.3)
    before = logits(model)
    assert fuse_layers(model.module) == 1
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_a_layer_that_computes_something_else_is_left_alone() -> None:
    config = LlamaConfig(**COMMON, num_hidden_layers=2, hidden_act="gelu")
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    assert fuse_layers(model) == 0
    assert not any(isinstance(child, FusedLayer) for child in model.modules())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_smoothing_evens_inputs_and_changes_no_result(name: str, tmp_path: Path) -> None:
    model = load(save(MODELS[name](), tmp_path))
    fuse_layers(model.module)
    first = next(layer for layer in model.module.modules() if isinstance(layer, FusedLayer))
    assert isinstance(first.norms[0].weight, Tensor)
    first.norms[0].weight[5] = 50.0  # an outlier
    before = logits(model)
    inputs: list[Tensor] = []
    first.qkv.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    with InputPeaks(model.module) as peaks:
        logits(model)
    peaks.smooth()
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-3)
    uneven, even = (float(x.abs().amax() / x.abs().amax(dim=0).median()) for x in inputs)
    assert even < uneven / 3
