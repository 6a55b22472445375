import random
from pathlib import Path

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.simulation.profile import Noise, RowTime, SharedHost, StepTimes, load_profile
from replicas.errors import ConfigError
from replicas.step_time import StepShape
from tests.cluster.simulation.small_world import PROFILE


def test_a_steps_time_is_linear_between_the_points_and_beyond() -> None:
    steps = StepTimes(
        rows=(RowTime(0, 1.0), RowTime(10, 2.0), RowTime(20, 4.0)),
        query_key_pair_s=0.5,
        read_token_s=0.25,
        sample_s=0.125,
    )
    times = [steps.seconds(StepShape(num_new_tokens=tokens)) for tokens in (0, 5, 10, 15, 30)]
    assert times == [1.0, 1.5, 2.0, 3.0, 6.0]
    shape = StepShape(num_new_tokens=10, prefill_work=4, kv_read_tokens=8, num_sampling=16)
    assert steps.seconds(shape) == 2.0 + 2.0 + 2.0 + 2.0


@pytest.mark.parametrize("name", ["cpu", "h200-8b"])
def test_bundled_profiles_resolve_the_default_configuration(name: str) -> None:
    profile = load_profile(name)
    resolved = profile.resolve(ClusterConfig())
    assert resolved.num_blocks * resolved.block_size >= resolved.max_model_len
    assert profile.source


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": msgspec.structs.replace(PROFILE.steps, rows=(RowTime(0, 1.0),))},
        {"steps": msgspec.structs.replace(PROFILE.steps, rows=(RowTime(0, 2.0), RowTime(1, 1.0)))},
        {"steps": msgspec.structs.replace(PROFILE.steps, read_token_s=-1.0)},
        {"cold_start_s": -1.0},
        {"noise": Noise(decodes=(1.0,), prefills=(0.5, 1.0))},
        {"noise": Noise(decodes=(0.5, 1.0), prefills=(1.0, 0.5))},
        {"noise": Noise(decodes=(0.0, 1.0), prefills=(0.5, 1.0))},
        {"shared_host": SharedHost(replicas=1, slowdown=0.9)},
        {"shared_host": SharedHost(replicas=2, slowdown=-0.1)},
        {"shared_host": SharedHost(replicas=2, slowdown=float("inf"))},
    ],
)
def test_impossible_profiles_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, **wrong)))
    with pytest.raises(ConfigError, match=r"p\.json"):
        load_profile(str(path))


def test_noise_is_drawn_from_the_quantiles_of_its_kind_of_step() -> None:
    noise = Noise(decodes=(0.5, 1.0, 3.0), prefills=(4.0, 4.0))
    draw = random.Random(0)
    decode, prefill = StepShape(num_new_tokens=1), StepShape().with_prefill(8, 0)
    factors = [noise.draw(decode, draw) for _ in range(2000)]
    assert 0.5 <= min(factors) < 0.51
    assert 2.9 < max(factors) < 3.0
    assert sorted(factors)[1000] == pytest.approx(1.0, abs=0.05)
    assert noise.draw(prefill, draw) == 4.0


def test_a_timer_draws_noise_where_there_is_some() -> None:
    shape = StepShape(num_new_tokens=1)
    assert PROFILE.timer(random.Random(0))(shape) == PROFILE.steps.seconds(shape)
    noisy = msgspec.structs.replace(PROFILE, noise=Noise(decodes=(2.0, 2.0), prefills=(1.0, 1.0)))
    assert noisy.timer(random.Random(0))(shape) == 2.0 * PROFILE.steps.seconds(shape)


def test_shared_host_and_noise_are_read_as_they_were_written(tmp_path: Path) -> None:
    noise = Noise(decodes=(0.9, 1.0, 2.0), prefills=(1.0, 1.5))
    shared = msgspec.structs.replace(PROFILE, shared_host=SharedHost(replicas=2, slowdown=0.9), noise=noise)
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(shared))
    assert load_profile(str(path)) == shared


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h200-8b"):
        load_profile("h100")
