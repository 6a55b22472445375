"""A Prometheus of a test: Debian's, scraping what a server's Ray lists."""

import contextlib
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.environment import free_port
from tests.e2e.server import wait_for

BINARY = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that answers at `url`."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return `data` of an answer of the HTTP API; fails the test when it says that the query is wrong."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Return the one value of an instant query, None without a series."""
        series = self.query(expression)
        return float(series[0]["value"][1]) if series else None


@contextlib.contextmanager
def scraping(targets: Path, folder: Path, rules: Path | None = None) -> Iterator[Prometheus]:
    """Run a Prometheus on the targets of a service-discovery file, for the time of the block."""
    assert BINARY is not None
    port = free_port(random.Random())
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [str(targets)]}]}],
        "rule_files": [] if rules is None else [str(rules)],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [
            BINARY,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _is_ready(url), "Prometheus to be ready")
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _is_ready(url: str) -> bool | None:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200 or None
    except httpx.TransportError:
        return None
