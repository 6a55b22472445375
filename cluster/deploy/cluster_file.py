"""The YAML file of `ray up`, read and checked as Ray itself will, before anything is started."""

import contextlib
import io
import json
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.config import read_yaml
from replicas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """What we need to know of a cluster."""

    path: Path
    name: str
    is_local: bool
    """The hosts are there already (`provider: local`) and are named in the file."""
    hosts: tuple[str, ...]
    """Of a local cluster, the head first; empty for others."""
    num_hosts: int
    """Head and workers that are to be up after the start."""
    mounted: tuple[Path, ...]
    """Files and folders of this machine that go to the hosts."""
    ssh_user: str
    ssh_key: Path | None
    ssh_proxy: str | None
    """A ProxyCommand of ssh, with %h and %p."""
    is_docker: bool
    """Ray runs in containers."""


def read_cluster(path: Path) -> ClusterFile:
    """Read a file. Raises ConfigError: one line with the file, the place in it and Ray's reason."""
    import click
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    document = read_yaml(path)
    try:
        logging.getLogger("ray.autoscaler").setLevel(logging.WARNING)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                prepared = prepare_config(document)  # talks to the terminal
            except (AttributeError, KeyError, TypeError) as error:
                _check_schema(document)
                raise ConfigError(f"{path}: Ray cannot read it: {error!r}") from None
            validate_config(prepared)
    except jsonschema.ValidationError as error:
        place = error.json_path.removeprefix("$").lstrip(".")
        raise ConfigError(f"{path}: {f'{place}: ' if place else ''}{error.message}") from None
    except (click.ClickException, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return _cluster_file(path, prepared)


def _check_schema(document: object) -> None:
    """Hold what Ray stumbles over against its schema: that says what is wrong with the shape."""
    import jsonschema

    spec = find_spec("ray.autoscaler")
    assert spec is not None
    assert spec.submodule_search_locations
    schema = Path(spec.submodule_search_locations[0]) / "ray-schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))


def _cluster_file(path: Path, prepared: dict[str, Any]) -> ClusterFile:
    provider = prepared["provider"]
    auth = prepared["auth"]
    num_workers = sum(kind["min_workers"] for kind in prepared["available_node_types"].values())
    is_local = provider["type"] == "local" and "head_ip" in provider
    key = auth.get("ssh_private_key")
    return ClusterFile(
        path=path,
        name=prepared["cluster_name"],
        is_local=is_local,
        hosts=(provider["head_ip"], *provider["worker_ips"]) if is_local else (),
        num_hosts=1 + num_workers,
        mounted=tuple(Path(local).expanduser() for local in prepared["file_mounts"].values()),
        ssh_user=auth.get("ssh_user", "ubuntu"),
        ssh_key=None if key is None else Path(key).expanduser(),
        ssh_proxy=auth.get("ssh_proxy_command"),
        is_docker=bool(prepared["docker"]),
    )
