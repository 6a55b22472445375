"""The Serve application, and the life of a cluster that serves it."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, RunTarget
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ApplicationStatus, LoggingConfig

from cluster import itl_targets
from cluster.config import ClusterConfig, HttpConfig, parse_config
from cluster.deployments import ledger_deployment, replica_deployment, router_deployment
from cluster.environment import connect_problem
from cluster.errors import StartError
from cluster.loading import LoadState, read_progress
from cluster.parts import OpenPump, open_pump
from replicas.config import EngineConfig
from replicas.errors import ConfigError, EngineError
from router.tenants import Tier

POLL_S: Final = 0.1
TARGETS_FILE: Final = "prom_metrics_service_discovery.json"
STATS_INTERVAL_S: Final = 1.0
"""Between two reports of a replica to the autoscaler."""
STATS_KEPT_S: Final = 3.0
"""Only the last value of each figure counts; older ones travel with it for so long."""


def build(arguments: dict[str, Any]) -> Application:
    """Return the application for a config document: Serve's import path `cluster.app:build`.

    Paths in it are absolute. Whoever configures Serve's own HTTP decides who reaches an open server.
    """
    config = parse_config(arguments)
    for path in (config.access.tenants_file, config.access.keys_file, config.access.pepper_file):
        if path is not None and not Path(path).is_absolute():
            raise ConfigError(f"access: {path} must be an absolute path here")
    return application(config)


def application(
    config: ClusterConfig, open_pump: OpenPump = open_pump, progress_folder: Path | None = None
) -> Application:
    """Return the application; replicas report how far they are into `progress_folder`, if given."""
    trace_to = config.tracing.endpoint
    is_gpu = _runs_on_gpu(config)
    engine = config.engine if is_gpu else _with_counted_threads(config.engine)
    engine = _with_tier_targets(engine, config.tiers)
    num_cpus = engine.num_threads or 1
    replicas = replica_deployment.options(
        **_number(config, engine),
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": 1 if is_gpu else 0},
        graceful_shutdown_timeout_s=config.drain_s,
        max_surge_percent=config.max_surge_percent,
    ).bind(engine, config.tiers, open_pump, _text(progress_folder), trace_to)
    routers = router_deployment.options(
        num_replicas=config.router.replicas,
        ray_actor_options={"num_cpus": 0, "label_selector": config.router.labels},
        graceful_shutdown_timeout_s=float(config.http.max_stream_s),
    )
    ledger = ledger_deployment.bind(config.access, config.tiers)
    app: Application = routers.bind(
        replicas, ledger, engine, config.access, config.tiers, config.autoscaling, trace_to
    )
    return app


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _number(config: ClusterConfig, engine: EngineConfig) -> dict[str, Any]:
    """How many replicas, as options of a deployment. The policy has delays and factors of its own."""
    scaling = config.autoscaling
    if scaling is None:
        return {"num_replicas": config.replicas}
    tiers = itl_targets.settled(config.tiers, engine)
    serve_config = ServeAutoscaling(
        min_replicas=scaling.min_replicas,
        initial_replicas=config.replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=STATS_INTERVAL_S,
        look_back_period_s=STATS_KEPT_S,
        policy=AutoscalingPolicy(
            policy_function="cluster.serve_policy:SlaPolicy",
            policy_kwargs=msgspec.to_builtins(msgspec.structs.replace(scaling, tiers=tiers)),
        ),
    )
    return {"autoscaling_config": serve_config}


def _runs_on_gpu(config: ClusterConfig) -> bool:
    if config.engine.device == "auto":
        return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1)
    return config.engine.device == "cuda"


def _with_counted_threads(engine: EngineConfig) -> EngineConfig:
    """One thread per reserved CPU: Ray sets OMP_NUM_THREADS to those, and more threads would not run."""
    return msgspec.structs.replace(engine, num_threads=engine.num_threads or 1)


def _with_tier_targets(engine: EngineConfig, tiers: tuple[Tier, ...]) -> EngineConfig:
    """What the tiers promise holds for the engine's steps, unless its own section says otherwise."""
    targets = itl_targets.promised(tiers) | engine.tier_itl_target_ms
    return msgspec.structs.replace(engine, tier_itl_target_ms=targets)


@contextlib.contextmanager
def local_ray(config: ClusterConfig, folder: Path) -> Iterator[None]:
    """Run a Ray of our own, with files in `folder`, for the time of the block.

    The environment of this process must hold `serve_environment` since before `ray.serve` was imported.
    """
    _quieten()
    num_cpus = config.most_replicas * (config.engine.num_threads or 1)
    try:
        ray.init(
            "local",
            num_cpus=max(os.cpu_count() or 1, num_cpus),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            _temp_dir=str(folder / "ray"),
        )
        _start_serve(config.http)
    except (RayError, RuntimeError, OSError) as error:
        ray.shutdown()
        raise StartError(f"Ray does not start: {_reason(str(error))}") from error
    try:
        _check_gpus(config)
        with _listed_targets(folder / "ray", config.metrics.targets_file):
            yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _listed_targets(folder: Path, targets_file: str | None) -> Iterator[None]:
    """List what Prometheus should scrape for the time of the block, where a Ray with a dashboard would.

    Without the dashboard nobody else does, but each node's agent exports its metrics all the same.
    Raises ConfigError when the file of the configuration cannot be written.
    """
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    document = json.dumps([{"labels": {"job": "ray"}, "targets": targets}])
    (folder / TARGETS_FILE).write_text(document)
    if targets_file is None:
        yield
        return
    try:
        Path(targets_file).write_text(document)
    except OSError as error:
        raise ConfigError(f"metrics.targets_file: {targets_file}: {error.strerror}") from None
    try:
        yield
    finally:
        Path(targets_file).unlink(missing_ok=True)


def _check_gpus(config: ClusterConfig) -> None:
    """Refuse what would wait for ever: on one machine no further GPU will come."""
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.engine.device == "cuda" and num_gpus < config.most_replicas:
        raise ConfigError(
            f"device cuda: {config.most_replicas} replica(s) need a GPU each, this machine has {num_gpus}"
        )


@contextlib.contextmanager
def running_ray(config: ClusterConfig, address: str) -> Iterator[None]:
    """Connect to a cluster for the time of the block; the application is removed at its end."""
    _quieten()
    if (problem := connect_problem(address)) is not None:  # Ray would try for two minutes
        raise ConfigError(f"no Ray cluster at {address}: {problem}")
    try:
        with _silent_stderr():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        hint = (
            "is the token in RAY_AUTH_TOKEN or ~/.ray/auth_token the cluster's?"
            if os.environ.get("RAY_AUTH_MODE") == "token"
            else "RAY_AUTH_MODE=token is needed if it asks for a token"
        )
        raise ConfigError(f"no Ray cluster at {address}: {_reason(str(error))}; {hint}") from error
    try:
        _start_serve(config.http)
        try:
            yield
        finally:
            serve.delete(config.name, _blocking=False)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what Ray's native code writes about each vain attempt to connect; the last one is raised."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _quieten() -> None:
    """Leave what Ray has to tell to its log files; what goes wrong is raised."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _start_serve(http: HttpConfig) -> None:
    serve.start(proxy_location="HeadOnly", http_options={"host": http.host, "port": http.port})


def deploy(config: ClusterConfig, open_pump: OpenPump, progress_folder: Path | None) -> None:
    """Hand the application to Serve; returns before it is up."""
    target = RunTarget(
        target=application(config, open_pump, progress_folder),
        name=config.name,
        route_prefix="/",
        logging_config=LoggingConfig(enable_access_log=False),
    )
    serve.run_many([target], wait_for_applications_running=False)


def wait_until_serving(
    config: ClusterConfig,
    progress_folder: Path,
    note: Callable[[LoadState], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadState:
    """Block until every replica serves; return the last state of one (empty if none reports to here).

    `note` gets the state of one that does not yet, again and again. Raises EngineError when loading
    failed for a reason that the user can mend, StartError otherwise.
    """
    while True:
        states = read_progress(progress_folder)
        for state in states:
            if state.error is not None:
                raise (EngineError if state.is_users else StartError)(state.error)
        if states:
            note(states[0])
        status = serve.status().applications.get(config.name)
        if status is not None and status.status == ApplicationStatus.RUNNING:
            return states[0] if states else LoadState()
        if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
            raise StartError(_reason(status.message))
        sleep(POLL_S)


def _reason(message: str) -> str:
    """Return the last line of Serve's account of a failure: the error itself, below its traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:1000] if lines else "Serve gives no reason"
