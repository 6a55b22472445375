import subprocess
from pathlib import Path

from cluster.haproxy import write_haproxy


def test_the_command_is_haproxy_without_splice(tmp_path: Path) -> None:
    command = write_haproxy(tmp_path)
    assert " -dS " in command.read_text()
    done = subprocess.run([command, "-v"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HAProxy version")
