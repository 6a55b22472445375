"""A server process for the time of a benchmark."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.environment import free_port
from cluster.errors import StartError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that answers."""

    url: str
    process: psutil.Process


@contextlib.contextmanager
def running_server(document: Mapping[str, object], command: list[str]) -> Iterator[RunningServer]:
    """Serve a configuration on a free port, for the time of the block.

    `command`: a Python module and its arguments, to which the configuration's file is added. Raises
    StartError.
    """
    port = free_port(random.Random())
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "headway.yaml"
        config.write_text(json.dumps({**document, "http": {"port": port}}))  # JSON is YAML
        process = subprocess.Popen(
            [sys.executable, "-m", *command, str(config)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise StartError(f"the server ended with exit code {process.wait()}")
            yield RunningServer(url=f"http://127.0.0.1:{port}", process=psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def served_model(url: str) -> str:
    """Return the name of the model that a server has."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name
