"""A `headway serve` process of a test, and what can be seen of it from outside."""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cluster.environment import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers at `url`."""

    process: subprocess.Popen[str]
    url: str
    port: int
    announced: str
    """What it printed when it was ready."""
    config: Path

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; returns its exit code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode

    def processes(self, title: str = "") -> list[int]:
        """Living processes below the server whose title contains `title`."""
        parents = {}
        titles = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    titles[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
        return [pid for pid in parents if self._is_above(pid, parents) and title in titles[pid]]

    def ray_address(self) -> str:
        """The address of the server's own Ray."""
        return self._raylet_option(r"--gcs-address=(\S+)")

    def folder(self) -> str:
        """Where the server keeps its files."""
        return self._raylet_option(r"--session_dir=(\S+?)/ray/")

    def deploy(self, number: int) -> None:
        """Deploy its configuration file, as it is now, again, with so many replicas. Null servers only.
        Serve takes it for a new version, and replaces all replicas one after the other."""
        arguments = [self.ray_address(), self.folder(), str(self.config), str(number)]
        subprocess.run(
            [sys.executable, "-m", "tests.e2e.redeploy", *arguments],
            cwd=ROOT,
            env=os.environ | {"RAY_AUTH_MODE": "token"},  # the default of a local cluster
            check=True,
            timeout=120,
        )

    def _raylet_option(self, pattern: str) -> str:
        (raylet,) = self.processes("/raylet/raylet ")
        command = Path(f"/proc/{raylet}/cmdline").read_text().replace("\0", " ")
        found = re.search(pattern, command)
        assert found is not None, command
        return found[1]

    def _is_above(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == self.process.pid:
                return True
        return False


def start(command: list[str], config: Path, port: int) -> Server:
    """Start `command`, which must announce itself on stdout; raises with its stderr when it ends instead."""
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        announced = [process.stdout.readline(), process.stdout.readline()]
        watchdog.cancel()
        if not all(announced):
            process.communicate()
            complaints.seek(0)
            raise RuntimeError(f"the server ended with {process.returncode}: {complaints.read()}")
    return Server(process, f"http://127.0.0.1:{port}", port, "".join(announced), config)


def start_null(folder: Path, config: str) -> Server:
    """Start a server around a runner without a model; `config` is YAML below the `http` section."""
    return _start(["cluster.bench.null_serve"], folder, config)


def start_model(folder: Path, config: str) -> Server:
    """Start `headway serve` itself, with the bundled model unless `config` names another."""
    return _start(["cluster.cli", "serve", "--config"], folder, config)


def start_cluster(folder: Path, config: str) -> Server:
    """Start a cluster without an application; it announces its address in the second line."""
    return _start(["tests.e2e.cluster"], folder, config)


def _start(command: list[str], folder: Path, config: str) -> Server:
    port = free_port(random.Random())
    path = folder / "headway.yaml"
    path.write_text(f"http: {{port: {port}}}\n{config}")
    return start([*command, str(path)], path, port)


def wait_for(probe: Callable[[], T | None], what: str, timeout_s: float = 60.0) -> T:
    """Poll `probe` until it gives something; fails the test when it never does."""
    patience = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if (found := probe()) is not None:
            return found
        patience.wait(0.05)
    raise AssertionError(f"waited {timeout_s} s for {what}")
