"""Serving from this process: start a cluster, wait until it answers, end it whatever happens."""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from cluster.config import ClusterConfig
from cluster.environment import JOIN_ENVIRONMENT, free_ports, serve_environment
from cluster.errors import StartError
from cluster.haproxy import write_haproxy
from cluster.loading import LoadState
from cluster.parts import OpenPump, open_pump
from cluster.processes import adopt_orphans, end_descendants
from cluster.terminal import StartDisplay
from replicas.hardware import available_cpus

END_GRACE_S: Final = 3.0
HEALTHY_TIMEOUT_S: Final = 60.0
MAX_TEMP_DIR_CHARS: Final = 7
"""HAProxy takes 97 characters for a socket's path; 73 follow the cluster's folder, which has 17 itself."""


class StopRequested(BaseException):
    """SIGINT or SIGTERM came. Not an Exception: nobody may take it for a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An application that answers."""

    url: str
    """Without a slash at the end."""
    state: LoadState
    """What a replica reported of its engine; empty when the replicas run elsewhere."""


@contextlib.contextmanager
def serving(
    config: ClusterConfig,
    display: StartDisplay,
    *,
    address: str | None = None,
    open_pump: OpenPump = open_pump,
) -> Iterator[Serving]:
    """Serve for the time of the block: on a Ray of our own, or on the running one at `address`.

    Takes over this process (environment, signal handlers, child processes): call it once, in a command,
    before anything imports `ray.serve`. At the end no process that it started is left. Raises EngineError
    when loading fails for a reason that the user can mend, StartError for others, StopRequested.
    """
    signals = _Signals()
    signals.arm()
    folder = Path(tempfile.mkdtemp(prefix="headway-", dir=_short_temp_dir()))
    adopt_orphans()
    try:
        display.show("starting Ray", None)
        ports = free_ports(random.Random())
        os.environ.update(serve_environment(config.http, config.metrics, folder, ports))
        os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_haproxy(folder))
        if address is not None:
            os.environ.update(JOIN_ENVIRONMENT)
        from cluster import app  # only now: Serve reads its environment when it is imported

        if address is None:
            config = _with_shared_cores(config)
        ray = app.local_ray(config, folder) if address is None else app.running_ray(config, address)
        with ray:
            signals.arm()  # ray.init has put its own handler there
            display.show("starting replicas", None)
            progress_folder = folder / "progress"
            progress_folder.mkdir()
            app.deploy(config, open_pump, progress_folder if address is None else None)
            state = app.wait_until_serving(
                config, progress_folder, lambda state: display.show(state.doing, state.share)
            )
            url = f"http://{_reachable(config.http.host)}:{config.http.port}"
            _wait_until_healthy(url)
            yield Serving(url=url, state=state)
    finally:
        end_descendants(END_GRACE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _with_shared_cores(config: ClusterConfig) -> ClusterConfig:
    """Split all cores but one among the engines.

    If each took all of them, or none were left to router and Ray, barriers would crawl.
    """
    if config.engine.num_threads is not None:
        return config
    num_threads = max(1, (available_cpus() - 1) // config.most_replicas)
    return msgspec.structs.replace(
        config, engine=msgspec.structs.replace(config.engine, num_threads=num_threads)
    )


def _reachable(host: str) -> str:
    """The address by which this host reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    problem = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError) as error:
            problem = str(error)
        time.sleep(0.05)
    raise StartError(f"{url}/health does not become ready: {problem}")


class _Signals:
    """The first SIGINT or SIGTERM raises StopRequested in the main thread; further ones change nothing."""

    def __init__(self) -> None:
        self._is_stopping = False

    def arm(self) -> None:
        """Take over both signals; again after something else (ray.init) has."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            raise StopRequested


def _short_temp_dir() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= MAX_TEMP_DIR_CHARS else "/tmp"
