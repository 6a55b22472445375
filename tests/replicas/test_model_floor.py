import torch
from torch import nn
from transformers import LlamaConfig

from replicas.model_floor import measure_floor, random_runner
from replicas.model_int8 import Int8Linear
from replicas.progress import silent
from tests.replicas.tiny_models import COMMON


def test_the_floor_counts_the_bytes_of_every_linear_layer() -> None:
    layer = nn.Linear(64, 32, bias=False).requires_grad_(False)
    module = nn.ModuleList([Int8Linear(layer, 63), layer])
    floor = measure_floor(module)
    assert floor.weight_bytes == (64 * 32 + 32 * 12) + 64 * 32 * 4
    assert floor.seconds == floor.weight_bytes / floor.read_bytes_per_s
    assert floor.products_s > 0


def test_a_random_model_runs_in_8_bits() -> None:
    torch.manual_seed(0)
    made = random_runner(LlamaConfig(**COMMON, num_hidden_layers=2), "int8", silent)
    linears = [layer for layer in made.runner.module.modules() if isinstance(layer, Int8Linear)]
    assert len(linears) == 2 * 4 + 1
    assert made.vocab_size == COMMON["vocab_size"]
