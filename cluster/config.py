"""ClusterConfig: the one YAML file that describes an application, and how it is read."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from cluster.autoscaling_policy import Policy
from replicas.config import EngineConfig
from replicas.errors import ConfigError
from router.tenants import DEFAULT_TIERS, TenantError, Tier, check_tiers

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where clients connect, and the limits of HAProxy in front of the routers.

    Host, port and limits are settled where Serve starts: on a running cluster they stay as they are.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    max_connections: Positive = 4096
    """Client connections that HAProxy accepts; more wait in the kernel's backlog."""
    num_threads: Positive = 1
    """HAProxy's threads. One forwards some 10,000 tokens a second."""
    max_stream_s: Positive = 3600
    """Longest life of one answer. A change of the router set ends older streams after so long."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The routers. Production takes two or more: one that dies ends its own connections."""

    replicas: Positive = 1
    labels: dict[str, str] = {}
    """Ray's labels that a host must have for a router to be on it; none = any host will do."""


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What Prometheus finds (docs/metrics.md)."""

    report_interval_s: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    """How often Ray's processes hand figures to their node's agent. Settled where Ray starts."""
    targets_file: str | None = None
    """Where `headway serve` puts Prometheus' list of targets besides its own folder."""


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans for OpenTelemetry (docs/tracing.md)."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"\Ahttps?://")] | None = None
    """Of a collector that takes OTLP over HTTP, like http://127.0.0.1:4318; None = no tracing."""


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may ask. Paths are relative to the configuration's folder; without keys everybody may."""

    tenants_file: str | None = None
    """YAML: `tenants`, a list. Read again when it changes."""
    keys_file: str | None = None
    """Written by `headway keys`. Read again when it changes."""
    pepper_file: str | None = None
    """Secret of the keys' hash, on every node; the environment's HEADWAY_KEY_PEPPER goes before it."""
    allow_anonymous: bool = False
    """Serve without keys on an address that others reach."""
    log: str = "stdout"
    """Where each router writes a line per request: a file, `stdout` (Ray keeps it in the session's logs)
    or `off`."""


class AutoscalingConfig(Policy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas, by what they have to do. Its tiers are those of the whole configuration."""

    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 5.0
    """Between two decisions."""
    dry_run: bool = False
    """Say what would be done, in log and metrics, and do nothing."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One application: one model behind one HTTP address."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}\Z")] = "headway"
    """Name of the Serve application; several may share a cluster."""
    replicas: Positive = 1
    """Engines. Each is one process with its own copy of the weights. With `autoscaling`: at the start."""
    autoscaling: AutoscalingConfig | None = None
    """None = always as many as `replicas`."""
    drain_s: PositiveSeconds = 600.0
    """Longest wait for the answers of a replica that is to stop."""
    max_surge_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    """Of the replicas, how many an update may start before it stops old ones. It waits for room for them:
    with 100 a single replica is replaced without a gap, but never where there is no place for a second."""
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    http: HttpConfig = HttpConfig()
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    """Classes of service; smaller levels are served sooner."""
    access: AccessConfig = AccessConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()

    @property
    def most_replicas(self) -> int:
        """As many as there may ever be at a time."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas


def load_config(path: Path) -> ClusterConfig:
    """Read a YAML file. Raises ConfigError: one line that names the file, the key and the reason."""
    document = read_yaml(path)
    try:
        config = parse_config({} if document is None else document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    folder = path.resolve().parent
    metrics = config.metrics
    if metrics.targets_file is not None:
        metrics = msgspec.structs.replace(metrics, targets_file=str(folder / metrics.targets_file))
    return msgspec.structs.replace(config, access=_located(config.access, folder), metrics=metrics)


def _located(access: AccessConfig, folder: Path) -> AccessConfig:
    """Make paths absolute: the processes that read them run in other folders."""
    fields = ["tenants_file", "keys_file", "pepper_file"]
    fields += [] if access.log in ("stdout", "off") else ["log"]
    given = {field: getattr(access, field) for field in fields}
    return msgspec.structs.replace(
        access, **{field: str(folder / name) for field, name in given.items() if name is not None}
    )


def read_yaml(path: Path) -> object:
    """Decode a YAML file. Raises ConfigError: one line that names the file, the place and the reason."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def parse_config(document: object) -> ClusterConfig:
    """Turn a decoded document into a ClusterConfig. Raises ConfigError with the key's path and a reason."""
    _refuse_unknown_keys(document, ClusterConfig, path="")
    try:
        config = msgspec.convert(document, ClusterConfig, str_keys=True)
        check_tiers(config.tiers)
        _check_autoscaling(config)
        return config
    except TenantError as error:
        raise ConfigError(f"tiers: {error}") from None
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        path = place.rstrip("`").lstrip(".")
        raise ConfigError(f"{path}: {reason}" if path else reason) from None


def _check_autoscaling(config: ClusterConfig) -> None:
    scaling = config.autoscaling
    if scaling is None:
        return
    if scaling.tiers:
        raise ConfigError("autoscaling.tiers: the tiers are those of the section `tiers`")
    if not scaling.min_replicas <= config.replicas <= scaling.max_replicas:
        raise ConfigError(
            f"replicas: {config.replicas} at the start is not within autoscaling's "
            f"{scaling.min_replicas} to {scaling.max_replicas}"
        )


def _refuse_unknown_keys(value: object, kind: Any, path: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping)):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, inner in value.items():
        place = f"{path}.{key}" if path else str(key)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
            raise ConfigError(f"{place}: unknown key; {hint}")
        _refuse_unknown_keys(inner, fields[key], place)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the first one would be ignored silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)
