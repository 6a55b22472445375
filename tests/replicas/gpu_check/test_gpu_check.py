"""The GPU check itself, tiny, on CPU: so that it runs when there is a GPU for a few minutes."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.attention.varlen import VarlenAttention
from replicas.gpu_check.__main__ import main
from replicas.gpu_check.parity import SHAPES, compare
from replicas.gpu_check.speed import TINY, Decode, measure
from tests.replicas.attention import fake_kernels

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
NAMES = ("flash", "torch_varlen", "aten_varlen")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_all_of_it_passes_on_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "parity numba_cpu, 16:2 heads of 64: ok" in said
    assert "parity flash: not checked, it computes on CUDA GPUs" in said
    assert said.count("equality") == 2
    assert "FAILED" not in said
    assert said.count("tok/s\n") == len(TINY.prompts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_kernels_that_keep_their_side_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels.install(monkeypatch)
    for shape in (SHAPES[1], SHAPES[2], SHAPES[4]):
        differences = list(compare(name, shape, CPU, torch.bfloat16))
        assert len(differences) == 7
        assert [d for d in differences if not d.passes(torch.bfloat16)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_leaves_a_row_unwritten_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels.install(monkeypatch)
    attend = VarlenAttention.attend

    def forgetful(self: Any, layer: int, query: Tensor, *rest: Any) -> Tensor:
        out = attend(self, layer, query, *rest)
        out[-1] = math.nan
        return out

    monkeypatch.setattr(VarlenAttention, "attend", forgetful)
    differences = list(compare(name, SHAPES[1], CPU, torch.bfloat16))
    assert [d for d in differences if d.passes(torch.bfloat16)] == []


def test_the_figures_follow_from_each_other() -> None:
    row = Decode(batch=64, step_ms=8.0, waiting_step_ms=9.5, floor_ms=6.0, scheduler_ms=0.5)
    assert (row.tokens_per_s, row.floor_share, row.hidden_ms) == (8000, 0.75, 1.5)


def test_batches_that_do_not_fit_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.gpu_check.speed._CPU_KV_BYTES", 5 * 16 * 2 * 2 * 2 * 16 * 4)
    rows = measure(CPU, TINY)
    assert [row.batch for row in rows] == [1]
    assert "    4  does not fit into the KV pool" in capsys.readouterr().out


def test_it_runs_without_what_a_gpu_machine_may_lack() -> None:
    lines = [
        "import sys",
        "for name in ('ray', 'numba', 'llvmlite', 'llguidance', 'gguf', 'accelerate', 'uvicorn', 'rich'):",
        "    sys.modules[name] = None",
        "import torch",
        "import replicas.gpu_check.__main__",
        "from replicas.gpu_check.speed import TINY, measure",
        "from dataclasses import replace",
        "measure(torch.device('cpu'), replace(TINY, batches=(1,), prompts=(16,)))",
    ]
    script = "\n".join(lines)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "attention sdpa" in done.stdout
