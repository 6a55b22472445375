from pathlib import Path

import pytest
import torch

from replicas.model import load_model
from replicas.model_profile import GpuMemory, kv_budget, run_largest_step
from replicas.model_source import ModelFiles
from replicas.progress import silent
from tests.replicas.tiny_models import VOCAB_SIZE, llama, save

GIB = 1 << 30


def test_the_pool_gets_what_weights_steps_and_graphs_leave() -> None:
    memory = GpuMemory(total=80 * GIB, free=60 * GIB, step=4 * GIB, graphs=1 * GIB)
    assert kv_budget(memory, 0.9) == 72 * GIB - 20 * GIB - 5 * GIB - (768 << 20)


def test_a_gpu_in_use_by_others_leaves_less() -> None:
    alone = GpuMemory(total=80 * GIB, free=60 * GIB, step=GIB, graphs=0)
    shared = GpuMemory(total=80 * GIB, free=50 * GIB, step=GIB, graphs=0)
    assert kv_budget(alone, 0.9) - kv_budget(shared, 0.9) == 10 * GIB


def test_nothing_left_is_nothing_not_less() -> None:
    assert kv_budget(GpuMemory(total=8 * GIB, free=GIB, step=GIB, graphs=GIB), 0.9) == 0


@pytest.mark.parametrize(("rows", "samples", "drawn"), [(40, 6, 6), (3, 8, 3)])
def test_the_largest_step_runs(tmp_path: Path, rows: int, samples: int, drawn: int) -> None:
    files = ModelFiles(name="tiny", folder=save(llama(), tmp_path))
    tokens = run_largest_step(load_model(files, torch.device("cpu"), torch.float32, silent), rows, samples)
    assert tokens.shape == (drawn,)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB_SIZE
