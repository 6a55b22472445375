from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from replicas import model_adapt
from replicas.config import Quantization
from replicas.errors import ConfigError
from replicas.model import LoadedModel, load_model
from replicas.model_adapt import Adapted, adapt
from replicas.model_int8 import WEIGHT_LEVELS
from replicas.model_source import ModelFiles
from replicas.progress import silent
from tests.replicas.tiny_models import VOCAB_SIZE, gemma2, llama, save


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with VNNI, whatever this one has."""
    monkeypatch.setattr(model_adapt, "weight_levels", lambda _: WEIGHT_LEVELS[0])


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(ModelFiles(name="tiny", folder=folder), torch.device("cpu"), dtype, silent)


def with_tokenizer(folder: Path) -> Path:
    """Give the model a tokenizer of words, most of which it does not know."""
    words = {"<unk>": 0} | {f"word{i}": i for i in range(1, VOCAB_SIZE - 1)} | {"the": VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def adapted(model: LoadedModel, folder: Path, wanted: Quantization | None) -> Adapted:
    return adapt(model, wanted, "exact", folder, 64, silent)


def test_the_default_is_int8_where_layers_can_be_calibrated(tmp_path: Path) -> None:
    folder = with_tokenizer(save(llama(), tmp_path))
    assert adapted(load(folder), folder, None) == Adapted(row_floor=1, quantization="int8")


def test_without_tokenizer_the_default_is_full_precision(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    assert adapted(load(folder), folder, None).quantization == "none"
    assert adapted(load(folder), folder, "int8").quantization == "int8"


def test_without_fused_layers_the_default_is_full_precision(tmp_path: Path) -> None:
    folder = with_tokenizer(save(gemma2(), tmp_path))
    assert adapted(load(folder), folder, None).quantization == "none"


def test_with_7_bit_weights_the_default_is_full_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_adapt, "weight_levels", lambda _: WEIGHT_LEVELS[1])
    folder = with_tokenizer(save(llama(), tmp_path))
    assert adapted(load(folder), folder, None).quantization == "none"


def test_int8_is_refused_for_other_formats(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    model = load(folder, torch.bfloat16)
    assert adapted(model, folder, None).quantization == "none"
    with pytest.raises(ConfigError, match="float32"):
        adapted(model, folder, "int8")
