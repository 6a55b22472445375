"""deploy/ray: every cluster file is one that Ray takes, in both forms, and starts nodes as ours must be."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.deploy.cluster_file import read_cluster

# Importing ray warns on some versions of its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/ray").glob("*.yaml"))
CLOUDS = [path for path in FILES if path.stem != "local"]
BY_NAME = {"argnames": "path", "ids": lambda path: path.stem}


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert found is not None
    return found[1]


def own_version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return found[1]


def other_form(text: str) -> dict[str, Any]:
    """The file with its commented alternative (containers or none) in force."""
    block = re.search(r"^# docker:.*\n(?:# .*\n)+", text, re.M)
    assert block is not None
    document: dict[str, Any] = yaml.safe_load(text)
    return document | yaml.safe_load(re.sub(r"^# ", "", block[0], flags=re.M))


def start_commands(document: dict[str, Any]) -> list[str]:
    return [" ; ".join(document[f"{kind}_start_ray_commands"]) for kind in ("head", "worker")]


def test_there_is_a_file_for_every_promised_place() -> None:
    assert [path.stem for path in FILES] == ["aws", "gcp", "local"]


@pytest.mark.parametrize(argvalues=FILES, **BY_NAME)
def test_ray_takes_the_file(path: Path) -> None:
    assert read_cluster(path).name == "headway"


@pytest.mark.parametrize(argvalues=FILES, **BY_NAME)
def test_ray_takes_the_other_form(path: Path, tmp_path: Path) -> None:
    other = tmp_path / path.name
    other.write_text(yaml.safe_dump(other_form(path.read_text())))
    assert read_cluster(other).is_docker != read_cluster(path).is_docker


@pytest.mark.parametrize(argvalues=FILES, **BY_NAME)
def test_both_forms_install_this_version_with_the_tested_ray(path: Path) -> None:
    text = path.read_text()
    wheel = f"headway-{own_version()}-py3-none-any.whl"
    for document in (yaml.safe_load(text), other_form(text)):
        assert document["file_mounts"][f"~/{wheel}"] == f"dist/{wheel}"
        assert document["file_mounts"]["~/headway-constraints.txt"] == "constraints.txt"
        assert any(f"-c ~/headway-constraints.txt ~/{wheel}" in line for line in document["setup_commands"])
    assert f"rayproject/ray:{pinned('ray')}-py311-gpu" in text


@pytest.mark.parametrize(argvalues=FILES, **BY_NAME)
def test_every_node_is_prepared_before_ray_starts(path: Path) -> None:
    for commands in start_commands(yaml.safe_load(path.read_text())):
        assert re.search(
            r"ray stop ; headway deploy env --max-connections \d+ --haproxy-threads \d+ --max-stream-s \d+ > "
            r"~/\.headway-env ; \. ~/\.headway-env && .* && ray start ",
            commands,
        )


@pytest.mark.parametrize(argvalues=FILES, **BY_NAME)
def test_the_token_goes_to_every_node_and_the_dashboard_stays_on_the_head(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    head, _ = start_commands(document)
    assert "--dashboard-host=127.0.0.1" in head


@pytest.mark.parametrize(argvalues=CLOUDS, **BY_NAME)
def test_a_cloud_has_a_gpu_for_every_replica_that_the_autoscaler_may_want(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    (application,) = yaml.safe_load((ROOT / "deploy/serve/many-gpus.yaml").read_text())["applications"]
    scaling = application["args"]["autoscaling"]
    gpu = document["available_node_types"]["gpu"]
    assert gpu["resources"]["GPU"] == 1
    assert (gpu["min_workers"], gpu["max_workers"]) == (scaling["min_replicas"], scaling["max_replicas"])
    assert document["max_workers"] == scaling["max_replicas"]


@pytest.mark.parametrize(argvalues=CLOUDS, **BY_NAME)
def test_the_head_runs_no_replica_and_spot_machines_are_an_option(path: Path) -> None:
    kinds = yaml.safe_load(path.read_text())["available_node_types"]
    assert kinds["head"]["resources"] == {"CPU": 0}
    assert kinds["gpu_spot"]["resources"] == kinds["gpu"]["resources"]
    assert kinds["gpu_spot"]["max_workers"] == 0


def test_amazons_security_group_is_named_and_opens_the_clients_port_alone() -> None:
    group = yaml.safe_load((ROOT / "deploy/ray/aws.yaml").read_text())["provider"]["security_group"]
    assert group["GroupName"] == "headway"
    assert [(rule["FromPort"], rule["ToPort"]) for rule in group["IpPermissions"]] == [(8000, 8000)]
    assert all("0.0.0.0/0" not in str(rule) for rule in group["IpPermissions"])
