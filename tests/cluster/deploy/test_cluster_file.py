"""Cluster files: what Ray would refuse is refused before anything starts, in one line."""

from pathlib import Path

import pytest

from cluster.deploy.cluster_file import ClusterFile, read_cluster
from replicas.errors import ConfigError

# Importing ray warns on some versions of its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LOCAL = "provider: {type: local, head_ip: a, worker_ips: [b, c]}\n"


def read(folder: Path, text: str) -> ClusterFile:
    path = folder / "c.yaml"
    path.write_text(text)
    return read_cluster(path)


def test_a_local_cluster_is_head_and_all_workers(tmp_path: Path) -> None:
    cluster = read(tmp_path, f"cluster_name: x\n{LOCAL}auth: {{ssh_user: u, ssh_private_key: ~/k}}\n")
    assert cluster.hosts == ("a", "b", "c")
    assert cluster.num_hosts == 3
    assert (cluster.ssh_user, cluster.ssh_key) == ("u", Path("~/k").expanduser())
    assert not cluster.is_docker


def test_fewer_workers_at_first_is_fewer_hosts(tmp_path: Path) -> None:
    assert read(tmp_path, f"cluster_name: x\nmin_workers: 1\n{LOCAL}").num_hosts == 2


def test_a_cloud_starts_the_least_number_of_every_type(tmp_path: Path) -> None:
    kinds = (
        "available_node_types: {h: {resources: {}, node_config: {}}, "
        "w: {min_workers: 2, resources: {}, node_config: {}}}"
    )
    text = f"cluster_name: x\nmax_workers: 3\nprovider: {{type: aws}}\nhead_node_type: h\n{kinds}\n"
    cluster = read(tmp_path, text)
    assert (cluster.num_hosts, cluster.hosts) == (3, ())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- x\n", "is not of type 'object'"),
        ("cluster_name: x\n", "'provider' is a required property"),
        (f"cluster_name: x\ncluster_nam: y\n{LOCAL}", "('cluster_nam' was unexpected)"),
        (f"cluster_name: x\n{LOCAL}docker: {{imag: y}}\n", "docker: Additional properties"),
        (f"cluster_name: x\n{LOCAL}docker: {{image: y}}\n", "Must provide a container & image name"),
        ("cluster_name: x\nprovider: {type: local, head_ip: a}\n", "Please supply a `head_ip` and list"),
        ("cluster_name: x\nprovider: {type: locl}\n", "Unsupported node provider: locl"),
        (f"cluster_name: x\ncluster_name: y\n{LOCAL}", "the key 'cluster_name' is given twice"),
        ("cluster_name: [\n", "c.yaml:2:1"),
    ],
)
def test_what_ray_refuses_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert str(tmp_path / "c.yaml") in str(refused.value)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""
