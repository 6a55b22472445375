"""`headway deploy` up to the moment when Ray would start: one line, and an exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.deploy.test_hosts import put

ROOT = Path(__file__).parents[3]
LOCAL = "cluster_name: x\nprovider: {type: local, head_ip: a, worker_ips: [b]}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds c.yaml, a cluster whose hosts let us in, and in bin/ the tools of this machine."""
    (tmp_path / "c.yaml").write_text(LOCAL)
    (tmp_path / "bin").mkdir()
    put(tmp_path / "bin", "ssh")
    put(tmp_path / "bin", "rsync")
    return tmp_path


def deploy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{folder}/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", "deploy", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def refusal(folder: Path, code: int, *arguments: str) -> str:
    """Run a command that must fail with `code`; returns its last line, after at most one of progress."""
    done = deploy(folder, *arguments)
    assert done.returncode == code, done
    assert done.stdout == ""
    *progress, line = done.stderr.splitlines()
    assert len(progress) <= 1, done.stderr
    return line


def test_a_file_that_ray_refuses(folder: Path) -> None:
    (folder / "c.yaml").write_text(f"{LOCAL}dokcer: {{}}\n")
    line = refusal(folder, 2, "up", "c.yaml")
    assert line == "headway: c.yaml: Additional properties are not allowed ('dokcer' was unexpected)"


def test_a_head_that_cannot_be_reached(folder: Path) -> None:
    put(folder / "bin", "ssh", "echo 'ssh: connect to host a port 22: No route to host' >&2; exit 255")
    for command in (["up"], ["status"], ["drain", "b"], ["down"]):
        line = refusal(folder, 1, command[0], "c.yaml", *command[1:])
        assert line == "headway: ubuntu@a over ssh: ssh: connect to host a port 22: No route to host"


def test_a_worker_that_cannot_be_reached_before_anything_starts(folder: Path) -> None:
    put(folder / "bin", "ssh", 'case "$*" in *ubuntu@b*) echo no >&2; exit 255;; esac')
    assert refusal(folder, 1, "up", "c.yaml") == "headway: ubuntu@b over ssh: no"


def test_an_application_that_cannot_run(folder: Path) -> None:
    (folder / "a.yaml").write_text("applications: [{name: a}]\n")
    line = refusal(folder, 2, "app", "c.yaml", "a.yaml")
    assert line == "headway: a.yaml: applications.0.import_path: Field required"


def test_help_does_not_import_ray() -> None:
    code = (
        "import sys\nfrom cluster.cli import main\ntry: main(['deploy', 'up', '--help'])\n"
        "except SystemExit: pass\nprint('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
