import pytest
import torch
from torch import Tensor, nn

from replicas.model_blocks import available
from replicas.model_fp32 import PackedLinear, pack_linears
from replicas.model_team import Team

pytestmark = pytest.mark.skipif(not available(), reason="needs AVX-512 with VNNI")


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def random_rows(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 96), (7, 64), (80, 70), (64, 1)])
def test_a_packed_layer_gives_the_results_of_the_layer(inputs: int, outputs: int, bias: bool) -> None:
    layer = linear(inputs, outputs, bias)
    x = random_rows(20, inputs)
    torch.testing.assert_close(PackedLinear(layer, Team(1))(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 40])
def test_a_row_has_the_same_bits_in_any_company(rows: int, threads: int) -> None:
    layer = linear(300, 160)
    x = random_rows(50, 300)
    expected = PackedLinear(layer, Team(1))(x)
    assert torch.equal(PackedLinear(layer, Team(threads))(x[50 - rows :].clone()), expected[50 - rows :])


def test_what_is_no_number_spoils_its_own_row_only() -> None:
    layer = PackedLinear(linear(64, 32), Team(1))
    x = random_rows(3, 64)
    expected = layer(x)
    x[1, 7] = float("nan")
    out = layer(x)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_every_linear_layer_is_replaced_and_no_other() -> None:
    model = nn.Sequential(linear(10, 64), nn.Sequential(nn.ReLU(), linear(64, 5)))
    x = random_rows(4, 10)
    expected = model(x)
    pack_linears(model, Team(1))
    assert [type(m).__name__ for m in model.modules() if not list(m.children())] == [
        "PackedLinear",
        "ReLU",
        "PackedLinear",
    ]
    torch.testing.assert_close(model(x), expected)
