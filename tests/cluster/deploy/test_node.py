"""`headway deploy env`: what a node's shell exports before `ray start`."""

import os
import subprocess
from pathlib import Path

import pytest

from cluster.config import HttpConfig
from cluster.deploy.node import node_folder, prepare_node
from cluster.errors import StartError


def exported(lines: str) -> dict[str, str]:
    """What a POSIX shell that reads the lines passes on to its children."""
    done = subprocess.run(
        ["sh", "-c", f"{lines}\nenv -0"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def test_a_shell_gets_the_limits_haproxy_and_the_token_mode(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    environment = exported(prepare_node(HttpConfig(max_connections=17, max_stream_s=90), folder))
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["RAY_SERVE_HAPROXY_MAXCONN"] == "17"
    assert environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "90"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(folder / "haproxy")
    assert os.access(folder / "haproxy", os.X_OK)


def test_a_node_can_be_prepared_again(tmp_path: Path) -> None:
    first = prepare_node(HttpConfig(), tmp_path / "node")
    assert prepare_node(HttpConfig(), tmp_path / "node") == first


def test_nobody_else_can_write_into_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir(mode=0o777)
    prepare_node(HttpConfig(), folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "node").symlink_to(tmp_path / "theirs")
    with pytest.raises(StartError, match="belongs to somebody else"):
        prepare_node(HttpConfig(), tmp_path / "node")


def test_sockets_fit_into_haproxys_limit() -> None:
    node_id = "f" * 56  # Serve puts a folder of this name between
    assert len(f"{node_folder(2**32 - 1)}/ha/{node_id}/metrics.sock") <= 97
