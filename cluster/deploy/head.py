"""What `headway deploy` does on a cluster's head, where Ray and its dashboard are: wait, apply, tell."""

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any, Final

import msgspec
import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import RayError

from cluster.errors import StartError

DASHBOARD: Final = "http://127.0.0.1:8265"
POLL_S: Final = 0.5
ON_HOST: Final = ("STARTING", "UPDATING", "RUNNING", "PENDING_MIGRATION", "STOPPING")
"""States in which a replica takes a place."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that belongs to the cluster now."""

    address: str
    node_id: str
    """Ray's name for it."""
    num_cpus: int
    num_gpus: int


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a deployment, as Serve tells it."""

    replica_id: str
    state: str
    node_ip: str | None = None


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One of an application's deployments, as Serve tells it."""

    status: str
    message: str = ""
    replicas: tuple[Replica, ...] = ()


class Application(msgspec.Struct, frozen=True, kw_only=True):
    """One application, as Serve tells it."""

    status: str
    message: str = ""
    route_prefix: str | None = None
    deployments: dict[str, Deployment] = {}

    def doing(self) -> str:
        """Its status in a few words."""
        counts = (
            f"{name} {sum(replica.state == 'RUNNING' for replica in deployment.replicas)}"
            f"/{len(deployment.replicas)}"
            for name, deployment in self.deployments.items()
        )
        return ", ".join([self.status.lower().replace("_", " "), *counts])


class Http(msgspec.Struct, frozen=True, kw_only=True):
    """Where Serve listens."""

    host: str | None = None
    port: int = 0


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """All that Serve runs."""

    http_options: Http | None = None
    applications: dict[str, Application] = {}

    def addresses(self, head: str) -> list[str]:
        """Where each application answers, given the head's address."""
        http = self.http_options or Http()
        host = head if http.host in (None, "0.0.0.0", "::") else http.host
        return [
            f"{name} at http://{host}:{http.port}{(application.route_prefix or '').rstrip('/')}"
            for name, application in self.applications.items()
        ]

    def on_host(self, address: str, states: Collection[str]) -> list[str]:
        """Replicas on a host that are in one of these states, by application and deployment."""
        return [
            f"{name}/{part}"
            for name, application in self.applications.items()
            for part, deployment in application.deployments.items()
            for replica in deployment.replicas
            if replica.node_ip == address and replica.state in states
        ]


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `headway deploy status`."""

    hosts: tuple[Host, ...]
    serving: Serving

    def lines(self) -> list[str]:
        """The same for people: a line per host, then a line per application."""
        where = [
            f"{host.address}: {host.num_cpus} CPUs, {host.num_gpus} GPUs, "
            f"runs {', '.join(self.serving.on_host(host.address, ('RUNNING',))) or 'no replica'}"
            for host in self.hosts
        ]
        return where + [
            f"{name}: {application.doing()}" for name, application in self.serving.applications.items()
        ]


def wait_for_hosts(
    number: int,
    timeout_s: float,
    say: Callable[[str], None],
    *,
    hosts: Callable[[], tuple[Host, ...]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Block until `number` hosts are in the cluster. Raises StartError after `timeout_s` seconds."""
    deadline = clock() + timeout_s
    seen = 0
    while (now := len(hosts())) < number:
        if now != seen:
            say(f"{now} of {number} hosts are up")
            seen = now
        if clock() > deadline:
            raise StartError(
                f"{now} of {number} hosts are up after {timeout_s:.0f} s; what became of the others is in "
                "/tmp/ray/session_latest/logs/monitor.* on the head"
            )
        sleep(POLL_S)
    say(f"{number} hosts are up")


def wait_until_running(
    names: list[str],
    timeout_s: float,
    say: Callable[[str], None],
    *,
    details: Callable[[], Serving],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Serving:
    """Block until all applications run; says every change. Raises StartError when one cannot, or too late."""
    deadline = clock() + timeout_s
    said: dict[str, str] = {}
    while True:
        serving = details()
        for name in names:
            application = serving.applications.get(name, Application(status="NOT_STARTED"))
            if said.get(name) != (doing := application.doing()):
                said[name] = doing
                say(f"{name}: {doing}")
            if application.status == "DEPLOY_FAILED":
                raise StartError(f"{name}: {_reason(application)}")
        running = [
            name for name, application in serving.applications.items() if application.status == "RUNNING"
        ]
        if set(names) <= set(running):
            return serving
        if clock() > deadline:
            raise StartError(f"not running after {timeout_s:.0f} s: {', '.join(set(names) - set(running))}")
        sleep(POLL_S)


def wait_until_empty(
    address: str,
    timeout_s: float,
    say: Callable[[str], None],
    *,
    details: Callable[[], Serving],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Block until no replica is on a host that drains; says every change. Raises StartError when too late."""
    deadline = clock() + timeout_s
    said: list[str] = []
    while left := details().on_host(address, ON_HOST):
        if left != said:
            say(f"{address}: {', '.join(left)} still there")
            said = left
        if clock() > deadline:
            raise StartError(
                f"after {timeout_s:.0f} s still on {address}: {', '.join(left)}; no other host has room, "
                "or long answers go on"
            )
        sleep(POLL_S)


def _reason(application: Application) -> str:
    """The last line of Serve's account: the error itself, below its traceback."""
    accounts = [application.message, *(part.message for part in application.deployments.values())]
    lines = [line.strip() for account in accounts for line in account.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "Serve gives no reason"


class Head:
    """This machine, as the head of a cluster. Raises StartError where it is none, or refuses us."""

    def address(self) -> str:
        """Return the address by which the other hosts know this one."""
        return str(ray.util.get_node_ip_address())

    def hosts(self) -> tuple[Host, ...]:
        if not ray.is_initialized():
            try:
                ray.init("auto", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
            except (RayError, RuntimeError, OSError, ValueError) as error:
                raise StartError(f"no Ray runs on the head, or it refuses us: {_last_line(error)}") from error
        return tuple(
            Host(
                address=node["NodeManagerAddress"],
                node_id=node["NodeID"],
                num_cpus=int(node["Resources"].get("CPU", 0)),
                num_gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in sorted(ray.nodes(), key=lambda node: str(node["NodeManagerAddress"]))
            if node["Alive"]
        )

    def details(self) -> Serving:
        with _one_line():
            return msgspec.convert(self._client.get_serve_details(), Serving)

    def drain(self, address: str, deadline_s: int | None) -> None:
        """Have Ray drain the host with this address. Raises StartError if there is none, or Ray refuses."""
        nodes = {host.address: host.node_id for host in self.hosts()}
        if address not in nodes or address == self.address():
            others = ", ".join(known for known in nodes if known != self.address())
            raise StartError(f"{address} is none of the hosts that can be drained: {others}")
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", nodes[address]]
        command += ["--address", ray.get_runtime_context().gcs_address]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "headway deploy drain"]
        command += [] if deadline_s is None else ["--deadline-remaining-seconds", str(deadline_s)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StartError(f"Ray does not drain {address}: {(done.stderr.strip() or '?').splitlines()[-1]}")

    def apply(self, document: dict[str, Any]) -> None:
        """Hand a Serve config document to Serve; replaces all applications that it does not name."""
        with _one_line():
            self._client.deploy_applications(document)

    @cached_property
    def _client(self) -> ServeSubmissionClient:
        return ServeSubmissionClient(DASHBOARD)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Turn what the dashboard's client raises into one line; pages of traceback come from the server."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise StartError(f"the dashboard at {DASHBOARD} refuses: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:500]
