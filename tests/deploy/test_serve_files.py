"""deploy/serve: every config file is one that Serve and `cluster.app:build` take."""

from pathlib import Path
from typing import Any

import pytest

# Importing ray.serve warns; so what imports it is imported inside.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FOLDER = Path(__file__).parents[2] / "deploy/serve"
FILES = sorted(FOLDER.glob("*.yaml"))


def applications(path: Path) -> list[dict[str, Any]]:
    from cluster.deploy.serve_file import read_serve_file

    found: list[dict[str, Any]] = read_serve_file(path)["applications"]
    return found


def built(application: dict[str, Any]) -> Any:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from cluster.app import build

    assert application["import_path"] == "cluster.app:build"
    return call_user_app_builder_with_args_if_necessary(build, application["args"])


def test_there_is_a_file_for_every_promised_case() -> None:
    assert [path.stem for path in FILES] == ["cpu-demo", "many-gpus", "one-gpu", "two-models"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_serve_and_our_builder_take_the_file(path: Path) -> None:
    for application in applications(path):
        router = built(application)._bound_deployment
        replica = router.init_args[0]._bound_deployment
        scaling = replica._deployment_config.autoscaling_config
        first = replica.num_replicas if scaling is None else scaling.initial_replicas
        assert first == application["args"]["replicas"]
        assert replica.ray_actor_options["num_gpus"] == (0 if path.stem == "cpu-demo" else 1)


def test_two_models_share_an_address() -> None:
    found = applications(FOLDER / "two-models.yaml")
    assert len({application["args"]["engine"]["model"] for application in found}) == 2
    assert [application["route_prefix"] for application in found] == ["/small", "/large"]


def test_many_gpus_are_scaled_and_have_more_than_one_router() -> None:
    (application,) = applications(FOLDER / "many-gpus.yaml")
    router = built(application)._bound_deployment
    assert router.num_replicas >= 2
    scaling = router.init_args[0]._bound_deployment._deployment_config.autoscaling_config
    assert scaling.max_replicas > scaling.min_replicas
