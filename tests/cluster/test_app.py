"""cluster.app:build, as Serve calls it for a config file."""

from typing import Any

import pytest

from replicas.errors import ConfigError

# Importing ray.serve warns; so it is imported inside the tests.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def deployments(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Build the application; returns its router's and its replica's deployment."""
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from cluster.app import build

    app = call_user_app_builder_with_args_if_necessary(build, arguments)
    assert isinstance(app, Application)
    router = app._bound_deployment
    return router, router.init_args[0]._bound_deployment


def test_serve_accepts_the_builder_and_its_arguments() -> None:
    router, replica = deployments({"replicas": 3, "router": {"replicas": 2}, "drain_s": 7})
    assert (router.name, router.num_replicas, router.ray_actor_options["num_cpus"]) == ("Router", 2, 0)
    assert (replica.name, replica.num_replicas) == ("Replica", 3)
    assert replica._deployment_config.graceful_shutdown_timeout_s == 7


def test_routers_go_where_the_labels_say() -> None:
    router, _ = deployments({"router": {"labels": {"stays": "yes"}}})
    assert router.ray_actor_options == {"num_cpus": 0, "label_selector": {"stays": "yes"}}


def test_updates_start_the_new_first_where_that_takes_no_room_or_room_is_given() -> None:
    surges = [
        [part._deployment_config.max_surge_percent for part in deployments(arguments)]
        for arguments in ({}, {"max_surge_percent": 50})
    ]
    assert surges == [[100, 0], [100, 50]]


def test_no_request_waits_in_serves_own_queue() -> None:
    for deployment in deployments({}):
        assert deployment.max_ongoing_requests >= 100_000


def test_an_engine_reserves_a_cpu_per_thread() -> None:
    _, replica = deployments({"engine": {"device": "cpu", "num_threads": 3}})
    assert replica.ray_actor_options == {"num_cpus": 3, "num_gpus": 0}
    assert replica.init_args[0].num_threads == 3


def test_an_engine_that_names_no_threads_gets_one() -> None:
    _, replica = deployments({"engine": {"device": "cpu"}})
    assert replica.ray_actor_options["num_cpus"] == 1
    assert replica.init_args[0].num_threads == 1


def test_an_engine_on_cuda_reserves_a_gpu() -> None:
    _, replica = deployments({"engine": {"device": "cuda"}})
    assert replica.ray_actor_options["num_gpus"] == 1
    assert replica.init_args[0].num_threads is None


def test_a_typo_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"http\.prot: unknown key; did you mean port\?"):
        deployments({"http": {"prot": 1}})


def test_an_autoscaled_deployment_decides_for_itself() -> None:
    _, replica = deployments({"replicas": 2, "autoscaling": {"max_replicas": 6, "dry_run": True}})
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 2, 6)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.metrics_interval_s) == (0, 0, 1)
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
    assert [tier.name for tier in policy.policy.tiers] == ["interactive", "standard", "batch"]
