import pytest
import torch
from torch import Tensor, nn

from replicas import model_blocks, model_int8
from replicas.errors import ConfigError
from replicas.model_int8 import WEIGHT_LEVELS, Int8Head, Int8Linear, quantise_linears, weight_levels
from replicas.model_team import Team

TEAMS = [None, *(Team(threads) for threads in (1, 3) if model_blocks.available())]
"""Each way to multiply that this machine has."""
by_every_team = pytest.mark.parametrize("team", TEAMS, ids=["torch", "tiles", "shared tiles"][: len(TEAMS)])


def random_rows(rows: int, width: int, seed: int = 2) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@by_every_team
@pytest.mark.parametrize("bias", [True, False])
def test_an_int8_layer_is_close_to_the_layer(bias: bool, team: Team | None) -> None:
    layer = linear(576, 96, bias)
    x = random_rows(20, 576)
    assert relative_error(Int8Linear(layer, 127, team)(x), layer(x)) < 0.01


@by_every_team
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 100])
@pytest.mark.parametrize("outputs", [64, 70, 320])
def test_every_way_to_multiply_gives_the_same_bits(outputs: int, rows: int, team: Team | None) -> None:
    """For every number of rows that a block of the kernels can have, and outputs that do not fill a tile."""
    layer = linear(80, outputs)
    x = random_rows(rows, 80) + 1
    assert torch.equal(Int8Linear(layer, 63, team)(x), Int8Linear(layer, 63)(x))


def test_rows_that_are_shifted_or_scaled_lose_no_precision() -> None:
    layer = linear(64, 32)
    for x in (random_rows(4, 64) + 5, random_rows(4, 64) * 1e6, random_rows(4, 64) * 1e-6):
        assert relative_error(Int8Linear(layer, 127)(x), layer(x)) < 0.02


def test_rows_of_zeros_give_the_bias() -> None:
    layer = linear(64, 32)
    assert torch.equal(Int8Linear(layer, 127)(torch.zeros(2, 64)), layer.bias.expand(2, 32))


@by_every_team
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33, 100, 257])
def test_a_row_has_the_same_bits_in_any_company(rows: int, team: Team | None) -> None:
    layer = Int8Linear(linear(1536, 160), weight_levels(team), team)
    x = random_rows(300, 1536)
    assert torch.equal(layer(x[300 - rows :].clone()), layer(x)[300 - rows :])


@by_every_team
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_its_own_row_only(strange: float, team: Team | None) -> None:
    layer = Int8Linear(linear(64, 32), 127, team)
    x = random_rows(3, 64)
    expected = layer(x)
    x[1, 7] = strange
    out = layer(x)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@by_every_team
def test_no_rows_give_no_rows(team: Team | None) -> None:
    assert Int8Head(linear(64, 32, bias=False), 127, team)(torch.zeros(1, 0, 64)).shape == (1, 0, 32)


def test_the_best_logits_of_a_head_are_those_of_full_precision() -> None:
    layer = linear(64, 1000, bias=False)
    x = random_rows(6, 64)
    full, logits = layer(x), Int8Head(layer, 127)(x)
    best = full.topk(30).indices
    torch.testing.assert_close(logits.gather(1, best), full.gather(1, best), rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, full)
    assert torch.equal(logits.argmax(1), full.argmax(1))


def test_all_layers_but_unsuitable_ones_are_replaced() -> None:
    model = nn.ModuleDict(
        {
            "inner": nn.Sequential(linear(64, 32), nn.ReLU()),
            "narrow": linear(10, 64),
            "head": linear(64, 50, bias=False),
            "other_head": linear(64, 50),
        }
    )
    quantise_linears(model, model["head"], None)
    kinds = {name: type(child).__name__ for name, child in model.items()}
    assert kinds == {
        "inner": "Sequential",
        "narrow": "Linear",
        "head": "Int8Head",
        "other_head": "Int8Linear",
    }
    assert isinstance(model["inner"][0], Int8Linear)  # type: ignore[index]


@by_every_team
def test_this_machine_multiplies_with_7_bits_at_least(team: Team | None) -> None:
    assert weight_levels(team) in WEIGHT_LEVELS


def saturating(x: Tensor, weight: Tensor) -> Tensor:
    """AVX2 without VNNI: inputs plus 128 as unsigned bytes, pairs of products added in 16 bits."""
    unsigned = x.long() + 128
    pairs = (unsigned[:, :, None] * weight.long()[None]).unflatten(1, (-1, 2)).sum(2)
    return (pairs.clamp(-32768, 32767).sum(1) - 128 * weight.long().sum(0)).int()


def test_where_8_bits_saturate_weights_have_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert weight_levels(None) == 63


def test_a_machine_that_multiplies_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda x, weight: saturating(x, weight) + 1)
    with pytest.raises(ConfigError, match="int8"):
        quantise_linears(nn.Sequential(linear(64, 32)), None, None)


def test_the_trial_sees_every_kind_of_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong for one shape only, as a BLAS that changes its kernel with the number of rows."""
    real = torch._int_mm
    for shape in model_int8._TEST_SHAPES:

        def wrong(x: Tensor, weight: Tensor, rows: int = shape[0]) -> Tensor:
            return real(x, weight) + (1 if len(x) == rows else 0)

        monkeypatch.setattr(torch, "_int_mm", wrong)
        with pytest.raises(ConfigError):
            weight_levels(None)
