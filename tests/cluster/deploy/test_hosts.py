"""Checks before `ray up`, against an ssh that does as the test says."""

from pathlib import Path

import pytest

from cluster.deploy.cluster_file import ClusterFile
from cluster.deploy.hosts import check_host, check_machine, check_mounts, stop_rays
from cluster.errors import StartError
from replicas.errors import ConfigError


def cluster(**fields: object) -> ClusterFile:
    defaults: dict[str, object] = {
        "path": Path("c.yaml"),
        "name": "x",
        "is_local": True,
        "hosts": ("a", "b"),
        "num_hosts": 2,
        "mounted": (),
        "ssh_user": "me",
        "ssh_key": None,
        "ssh_proxy": None,
        "is_docker": False,
    }
    return ClusterFile(**(defaults | fields))  # type: ignore[arg-type]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, script: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_missing_tools_are_named(tools: Path) -> None:
    put(tools, "ssh")
    with pytest.raises(ConfigError, match=r"^rsync must be installed"):
        check_machine(cluster())


def test_a_missing_key_is_named(tools: Path, tmp_path: Path) -> None:
    put(tools, "ssh")
    put(tools, "rsync")
    with pytest.raises(ConfigError, match=r"auth.ssh_private_key: .*/nokey does not exist"):
        check_machine(cluster(ssh_key=tmp_path / "nokey"))


def test_a_missing_wheel_is_named_with_the_way_to_make_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"x\.whl does not exist; `make wheel` makes it"):
        check_mounts(cluster(mounted=(token, tmp_path / "x.whl")), token)
    assert not token.exists()


def test_a_missing_token_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    token = tmp_path / "ray" / "token"
    check_mounts(cluster(mounted=(token,)), token)
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600


def test_a_token_stays_as_it_is(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("mine")
    check_mounts(cluster(mounted=(token,)), token)
    assert token.read_text() == "mine"


def test_a_host_is_asked_as_ray_would(tools: Path, tmp_path: Path) -> None:
    put(tools, "ssh", f'echo "$@" > {tmp_path}/asked')
    check_host(cluster(ssh_key=Path("/k"), ssh_proxy="nc %h %p"), "a")
    asked = (tmp_path / "asked").read_text()
    assert "-o ProxyCommand=nc %h %p" in asked
    assert "-i /k me@a " in asked


def test_a_host_that_refuses_us_is_named_with_sshs_reason(tools: Path) -> None:
    put(tools, "ssh", "echo first >&2; echo 'me@a: Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(StartError, match=r"^me@a over ssh: me@a: Permission denied \(publickey\)\.$"):
        check_host(cluster(), "a")


def test_a_host_without_rsync_is_named(tools: Path) -> None:
    put(tools, "ssh", "exit 1")
    with pytest.raises(StartError, match=r"^a has no rsync"):
        check_host(cluster(), "a")


def test_a_ray_that_does_not_stop_is_told(tools: Path) -> None:
    put(tools, "ssh", "echo 'ray: command not found' >&2; exit 127")
    assert stop_rays(cluster(), ["a"]) == ["a: ray stop: ray: command not found"]


def test_a_host_that_is_gone_does_not_keep_the_others_from_stopping(tools: Path, tmp_path: Path) -> None:
    put(tools, "ssh", f'case "$*" in *me@a*) echo gone >&2; exit 255;; esac; echo "$@" > {tmp_path}/asked')
    assert stop_rays(cluster(), ["a", "b"]) == ["me@a over ssh: gone"]
    assert "me@b " in (tmp_path / "asked").read_text()
