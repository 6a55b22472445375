from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from replicas.errors import ModelError, UnsupportedModelError
from replicas.model import LoadedModel, load_model
from replicas.model_source import ModelFiles
from replicas.progress import silent
from tests.replicas.tiny_models import MODELS, VOCAB_SIZE, WINDOW, llama, save

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def load(folder: Path) -> LoadedModel:
    return load_model(ModelFiles(name="tiny", folder=folder), CPU, torch.float32, silent)


def refusal(config: PreTrainedConfig, folder: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load(save(config, folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_model_needs_is_observed(tmp_path: Path) -> None:
    model = load(save(MODELS["gemma2"](), tmp_path))
    assert model.needs.windows == (WINDOW, None)
    assert model.needs.softcap
    assert (model.needs.num_heads, model.needs.num_kv_heads, model.needs.head_dim) == (4, 2, 16)
    assert (model.vocab_size, model.max_position_embeddings) == (VOCAB_SIZE, 512)


def test_every_layer_of_mistral_slides(tmp_path: Path) -> None:
    assert load(save(MODELS["mistral"](), tmp_path)).needs.windows == (WINDOW, WINDOW)


def test_end_tokens_come_from_config_and_generation_config(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load(folder).eos_token_ids == (2, 5, 7)


def test_tied_embeddings_share_their_memory(tmp_path: Path) -> None:
    module: Any = load(save(llama(), tmp_path)).module
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_progress_ends_at_all_of_it(tmp_path: Path) -> None:
    seen: list[tuple[str, float | None]] = []
    files = ModelFiles(name="tiny", folder=save(llama(), tmp_path))
    load_model(files, CPU, torch.float32, lambda what, share: seen.append((what, share)))
    assert seen[0] == ("loading weights", None)
    assert seen[-1] == ("loading weights", 1.0)


def test_learned_positions_are_supported(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = load(save(config, tmp_path))
    assert model.max_position_embeddings == 64
    assert model.needs.windows == (None, None)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(**TINY, n_layer=1), "BloomForCausalLM does not let its attention be replaced"),
        (MambaConfig(**TINY), "mamba has layers of type linear_attention"),
        (Lfm2Config(**TINY, num_key_value_heads=2, layer_types=["conv"]), "lfm2 has layers of type conv"),
        (
            LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "llama uses rope_type dynamic: a row's rotation would depend on its batch",
        ),
        (
            GptOssConfig(
                **TINY, num_key_value_heads=2, head_dim=16, num_local_experts=2, intermediate_size=32
            ),
            "the model uses attention sinks, which the paged path lacks",
        ),
    ],
    ids=["bloom", "mamba", "lfm2", "dynamic-rope", "sinks"],
)
def test_unsupported_architectures_are_refused(config: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    assert refusal(config, tmp_path) == reason


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="t5 is an encoder-decoder model"):
        load(tmp_path)


def test_missing_weights_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama())
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"3 weights are missing or misshapen, first model\.layers\.1\.mlp"):
        load(tmp_path)


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 12])
    with pytest.raises(ModelError, match="model 'tiny' cannot be loaded: "):
        load(folder)


def test_an_unknown_architecture_is_an_error(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match=r"model 'tiny': config\.json: .*no_such_model"):
        load(folder)
