"""Environment of a cluster: what Ray Serve reads before anything starts, the same on every node.

Serve takes these settings from environment variables of the process that starts Ray, when `ray.serve` is
first imported: apply them before.
"""

import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.config import HttpConfig, MetricsConfig

NUM_INGRESS_PORTS: Final = 1000
"""A stopped router's port is not used again for max_stream_s + 30 s; so many routers may come and go."""
CONNECT_TIMEOUT_S: Final = 5.0
JOIN_ENVIRONMENT: Final = {"RAY_NUM_REDIS_GET_RETRIES": "3"}
"""For a process that joins a running cluster: Ray then says after 3 s, not 20, that it refuses the token."""
PORTS: Final = range(10_000, 32_000)
"""Below the ports that the kernel hands out, which Ray's processes take by the dozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where Serve listens on a host besides the port of the clients."""

    stats: int
    """HAProxy's pages of statistics."""
    metrics: int
    """HAProxy's own metrics, for Prometheus."""
    fallback_http: int
    """Serve's own proxy, to which HAProxy turns while no router answers."""
    fallback_grpc: int
    """The same for gRPC."""
    first_ingress: int
    """The first of NUM_INGRESS_PORTS on which routers answer HAProxy."""


def free_ports(draw: random.Random) -> Ports:
    """Return ports that are free at this moment: two clusters on one host do not collide."""
    return Ports(
        stats=free_port(draw),
        metrics=free_port(draw),
        fallback_http=free_port(draw),
        fallback_grpc=free_port(draw),
        first_ingress=draw.randrange(PORTS.start, PORTS.stop - NUM_INGRESS_PORTS),
    )


def serve_environment(http: HttpConfig, metrics: MetricsConfig, folder: Path, ports: Ports) -> dict[str, str]:
    """Return the variables of a cluster that keeps its files in `folder`."""
    sockets = folder / "ha"
    return {
        # HAProxy passes bytes straight to the routers: no Python proxy of Serve's in the token path.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_MAXCONN": str(http.max_connections),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(http.num_threads),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(http.max_stream_s),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(http.max_stream_s),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.metrics),
        # Its default is one for all clusters of a host, which then share it by SO_REUSEPORT: a request could
        # reach another cluster, with other keys.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(sockets / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(sockets / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(sockets / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(sockets),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(sockets / "server-state"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.first_ingress),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.first_ingress + NUM_INGRESS_PORTS),
        # No load balancer but HAProxy has to notice that a router leaves.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Serve reads some client headers before our application does.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.ingress:middlewares",
        # One event loop per process: a token crosses no thread between two sockets.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Ray starts its workers at niceness 15: everything else on the machine would go before them.
        "RAY_worker_niceness": "0",
        "RAY_metrics_report_interval_ms": str(round(metrics.report_interval_s * 1e3)),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def free_port(draw: random.Random) -> int:
    """Return a TCP port of this host that nobody listens on now, and that nobody is given by chance."""
    while True:
        port = draw.choice(PORTS)
        if port_problem("0.0.0.0", port) is None:
            return port


def port_problem(host: str, port: int) -> str | None:
    """Why a server could not listen there; None when it can."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"host {host!r} is not known: {error.strerror}"
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return f"cannot listen on {host}:{port}: {error.strerror}"
    return None


def connect_problem(address: str) -> str | None:
    """Why nobody answers at HOST:PORT; None when somebody does, or the address is of another form."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and "/" not in host):
        return None
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return None
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
