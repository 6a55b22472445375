"""Headway as a command: benchmarks and servers in processes of their own. Nothing of it is imported."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import yaml

from load.connection import Target
from load.errors import LoadError
from load.experiments.subject import Subject, look_at
from load.plan import Script

BENCH_TIMEOUT_S: Final = 900.0
START_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
KEYS_TIMEOUT_S: Final = 30.0
HEALTH_POLL_S: Final = 0.25
ACCESS_FILES: Final = ("tenants_file", "keys_file", "pepper_file")
NO_LIMITS: Final[dict[str, Any]] = {"max_queue": 1_000_000, "queue_ttl_s": 3600.0, "ttft_target_ms": None}
"""Fields of a tier that refuses nobody, however long the wait."""


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """Where experiments run."""

    command: tuple[str, ...]
    """How to call Headway."""
    model: str | None
    is_quick: bool
    seed: int
    profile: str
    """Of the GPU that is simulated."""

    def bench(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run `headway bench NAME` here and return its JSON. Raises LoadError."""
        model = () if self.model is None or name == "kv" else ("--model", self.model)
        return self._json("bench", name, *arguments, *model)

    def simulated_bench(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run `headway bench NAME` with the GPU's profile and return its JSON. Raises LoadError."""
        return self._json("bench", name, *arguments, "--profile", self.profile)

    def simulate(
        self,
        scripts: Sequence[Script],
        engine: dict[str, Any],
        *,
        tiers: Sequence[dict[str, Any]] = (),
        shares: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """Serve scripts of one turn on virtual time, by one replica of the profile; return the figures.

        `tiers`: default: those that a server has by itself. `shares`: of the requests, by tier; default: all
        are of the first. Raises LoadError.
        """
        names = [tier["name"] for tier in tiers] or ["interactive"]
        shared = ",".join(f"{tier}={share}" for tier, share in (shares or {names[0]: 1.0}).items())
        with tempfile.TemporaryDirectory(prefix="headway-load-") as folder:
            config, trace = Path(folder) / "headway.yaml", Path(folder) / "trace.csv"
            config.write_text(yaml.safe_dump(_settings(engine, tiers)), "utf-8")
            trace.write_text(_trace(scripts), "utf-8")
            return self._json(
                "simulate", "--config", str(config), "--trace", str(trace), "--profile", self.profile,
                "--tier-shares", shared, "--seed", str(self.seed),
            )  # fmt: skip

    def _json(self, *arguments: str) -> dict[str, Any]:
        full = [*self.command, *arguments, "--json"]
        try:
            done = subprocess.run(full, stdout=subprocess.PIPE, timeout=BENCH_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LoadError(f"{' '.join(full)}: {error}") from error
        try:
            fields: dict[str, Any] = msgspec.json.decode(done.stdout, type=dict[str, Any])
        except msgspec.DecodeError:
            raise LoadError(f"{' '.join(full)} ended with {done.returncode} and printed no JSON") from None
        return fields

    @contextlib.contextmanager
    def serving(
        self,
        engine: dict[str, Any],
        *,
        tiers: Sequence[dict[str, Any]] = (),
        tenants: Sequence[dict[str, Any]] = (),
    ) -> Iterator[Subject]:
        """Start a server with these settings, wait until it is healthy, and end it afterwards.

        `tenants` get a key each. Raises LoadError.
        """
        port = _free_port()
        model = {} if self.model is None else {"model": self.model}
        settings = _settings(engine | model, tiers) | {"http": {"port": port}}
        with tempfile.TemporaryDirectory(prefix="headway-load-") as folder:
            config = Path(folder) / "headway.yaml"
            if tenants:
                settings["access"] = {name: name.replace("_file", ".yaml") for name in ACCESS_FILES}
                (Path(folder) / "tenants.yaml").write_text(
                    yaml.safe_dump({"tenants": list(tenants)}), "utf-8"
                )
            config.write_text(yaml.safe_dump(settings), "utf-8")
            keys = {tenant["name"]: self._new_key(tenant["name"], config) for tenant in tenants}
            with self._process(config, port):
                _wait_until_known(f"http://127.0.0.1:{port}/v1/models", keys)
                yield look_at(Target(host="127.0.0.1", port=port), keys)

    def _new_key(self, tenant: str, config: Path) -> str:
        full = [*self.command, "keys", "create", tenant, "--config", str(config)]
        done = subprocess.run(full, capture_output=True, text=True, timeout=BENCH_TIMEOUT_S, check=False)
        if (key := re.search(r"\bhw_\S+", done.stdout)) is None:
            raise LoadError(f"{' '.join(full)} printed no key: {done.stderr.strip()[-500:]}")
        return key[0]

    @contextlib.contextmanager
    def _process(self, config: Path, port: int) -> Iterator[None]:
        log = config.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.command, "serve", "--config", str(config)],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                _wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)
                yield
            finally:
                _end(process)


def find_headway() -> tuple[str, ...]:
    """Return the `headway` command of this Python, else of the PATH, else of the current folder."""
    beside = Path(sys.executable).with_name("headway")
    if beside.exists():
        return (str(beside),)
    found = shutil.which("headway")
    return (found,) if found else (sys.executable, "-m", "cluster.cli")


def _settings(engine: dict[str, Any], tiers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"engine": engine} | ({"tiers": list(tiers)} if tiers else {})


def _trace(scripts: Sequence[Script]) -> str:
    rows = [(script.at_s, script.turns[0].input_tokens, script.turns[0].output_tokens) for script in scripts]
    header = "arrival_s,input_tokens,output_tokens"
    return "\n".join([header, *(",".join(map(repr, row)) for row in rows)]) + "\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        time.sleep(HEALTH_POLL_S)
    last = log.read_bytes()[-2000:].decode("utf-8", "replace").strip()
    raise LoadError(f"the server did not become healthy; its last words: {last or 'none'}")


def _wait_until_known(url: str, keys: dict[str, str]) -> None:
    """Wait until the routers take the keys: they spread after the server is up."""
    give_up_at = time.monotonic() + KEYS_TIMEOUT_S
    for tenant, key in keys.items():
        headers = {"authorization": f"Bearer {key}"}
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, headers=headers, timeout=5.0, trust_env=False).status_code != 401:
                    break
            if time.monotonic() > give_up_at:
                raise LoadError(
                    f"after {KEYS_TIMEOUT_S:g} s the server still does not take the key of {tenant}"
                )
            time.sleep(HEALTH_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    if process.poll() is None:
        # The session is the server's own: it was started with one.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
