import pytest
import torch
from torch import Tensor, nn

from replicas.model_exact import MAX_ROW_FLOOR, RowBlocks, WholeRows, make_exact, row_floor
from replicas.model_rotary import RotaryTable, tabulate_rotary


class RoundsByCount(nn.Linear):
    """Another result below `least` rows, and for counts in `odd`: BLAS with its kernels, writ large."""

    def __init__(self, least: int, odd: tuple[int, ...] = ()) -> None:
        super().__init__(8, 8, bias=False)
        self.least, self.odd = least, odd

    def forward(self, x: Tensor) -> Tensor:
        off = len(x) < self.least or len(x) in self.odd
        return x * 3 + (1e-3 if off else 0.0)


def random_rows(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (576, 192), (160, 64)])
def test_from_the_floor_on_rows_do_not_depend_on_their_number(shape: tuple[int, int]) -> None:
    layer = nn.Linear(*shape).requires_grad_(False)
    floor = row_floor(layer)
    assert floor is not None
    x = random_rows(300, shape[0])
    whole = layer(x)
    for count in (floor, floor + 1, floor + 5, 2 * floor + 3, 111, 300):
        assert torch.equal(layer(x[300 - count :].clone()), whole[300 - count :])


@pytest.mark.parametrize("least", [1, 2, 7, 20, 48])
def test_the_floor_is_the_smallest_safe_count(least: int) -> None:
    assert row_floor(RoundsByCount(least)) == least


def test_a_gap_among_safe_counts_raises_the_floor_above_it() -> None:
    assert row_floor(RoundsByCount(4, odd=(13,))) == 14


def test_a_layer_without_safe_count_has_no_floor() -> None:
    assert row_floor(RoundsByCount(257)) is None


@pytest.mark.parametrize("least", [100, 257])
def test_layers_without_a_usable_floor_are_cut_into_equal_blocks(least: int) -> None:
    class Strict(RoundsByCount):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape == (MAX_ROW_FLOOR, 8) or not sealed
            return super().forward(x)

    model = nn.Sequential(Strict(least), nn.Linear(8, 8).requires_grad_(False))
    sealed = False
    floor = make_exact(model)
    sealed = True
    assert isinstance(model[0], RowBlocks)
    assert isinstance(model[1], nn.Linear)
    assert floor <= MAX_ROW_FLOOR
    x = random_rows(150, 8)
    whole = model[0](x[None])
    assert whole.shape == (1, 150, 8)
    assert torch.equal(model[0](x[70:75]), whole[0, 70:75])


@pytest.mark.parametrize("width", [96, 100, 1536, 40_000])
@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(approximate="tanh")])
def test_activations_give_a_row_the_same_bits_in_any_company(function: nn.Module, width: int) -> None:
    """Called plainly, both functions fail this at width 100."""
    x = random_rows(45, width) * 3
    whole = WholeRows(function)(x)
    torch.testing.assert_close(whole, function(x), atol=1e-6, rtol=1e-5)
    for first in (0, 3):
        for end in range(first + 1, 45, 3):
            assert torch.equal(WholeRows(function)(x[None, first:end])[0], whole[first:end])


def test_activations_inside_a_model_are_replaced_once() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.SiLU()))
    make_exact(model)
    make_exact(model)
    inner = model[0][1]
    assert isinstance(inner, WholeRows)
    assert isinstance(inner.inner, nn.SiLU)


class ToyRotaryEmbedding(nn.Module):
    calls = 0

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str = "full") -> tuple[Tensor, Tensor]:
        self.calls += 1
        angle = position_ids[..., None] * (0.1 if layer_type == "full" else 0.2) * torch.ones(6)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def test_rotary_tables_return_what_the_model_computes() -> None:
    model = nn.ModuleDict({"rotary_emb": ToyRotaryEmbedding()})
    tabulate_rotary(model, max_positions=50)
    table = model["rotary_emb"]
    assert isinstance(table, RotaryTable)
    positions = torch.tensor([[0, 49, 7, 7]])
    for layer_type in ("full", "sliding"):
        ours = table(torch.zeros(1), positions, layer_type)
        for mine, theirs in zip(
            ours, ToyRotaryEmbedding()(torch.zeros(1), positions, layer_type), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    table(torch.zeros(1), positions, "full")
    assert table.inner.calls == 2


def test_rotary_bits_depend_on_the_position_only() -> None:
    table = RotaryTable(ToyRotaryEmbedding(), 50)
    whole, _ = table(torch.zeros(1), torch.arange(50)[None])
    part, _ = table(torch.zeros(1), torch.arange(13, 20)[None])
    assert torch.equal(part, whole[:, 13:20])
