"""What a node needs before `ray start`: the environment that Serve and our routers expect, on every node."""

import os
import shlex
import stat
from pathlib import Path
from typing import Final

from cluster.config import HttpConfig, MetricsConfig
from cluster.environment import Ports, serve_environment
from cluster.errors import StartError
from cluster.haproxy import write_haproxy

PORTS: Final = Ports(stats=8404, metrics=9101, fallback_http=8500, fallback_grpc=9500, first_ingress=30_000)
"""The same on every node, for the rules of firewalls. Below the kernel's ephemeral ports."""


def node_folder(user_id: int) -> Path:
    """Where HAProxy's files lie on a node. Short, because the paths of sockets are bounded."""
    return Path(f"/tmp/headway-{user_id}")


def prepare_node(http: HttpConfig, folder: Path) -> str:
    """Write HAProxy's command into `folder`; return the environment as lines for a POSIX shell.

    Raises StartError when the folder belongs to somebody else, who could exchange the command.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise StartError(f"{folder} belongs to somebody else: remove it")
    folder.chmod(0o700)
    environment = serve_environment(http, MetricsConfig(), folder, PORTS) | {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_haproxy(folder)),
        # Whoever reaches one of Ray's ports may otherwise run code.
        "RAY_AUTH_MODE": "token",
    }
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
