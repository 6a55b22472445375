"""What must hold before `ray up`, which waits for minutes or leaves a host out where one line can say why."""

import secrets
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from cluster.deploy.cluster_file import ClusterFile
from cluster.errors import StartError
from replicas.errors import ConfigError

CONNECT_TIMEOUT_S: Final = 10
COMMAND_TIMEOUT_S: Final = 60
MAX_CONNECTIONS: Final = 16
SSH_FAILED: Final = 255
"""What ssh itself exits with; anything else is the command's."""
TOOLS: Final = ("ssh", "rsync")


def check_machine(cluster: ClusterFile) -> None:
    """Raise ConfigError when this machine lacks what it needs to reach the cluster."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be installed on this machine")
    if cluster.ssh_key is not None and not cluster.ssh_key.exists():
        raise ConfigError(f"{cluster.path}: auth.ssh_private_key: {cluster.ssh_key} does not exist")


def check_mounts(cluster: ClusterFile, token: Path) -> None:
    """Raise ConfigError when a file to be copied is not there; a missing `token` is made first."""
    missing = [path for path in cluster.mounted if not path.exists() and path != token]
    if missing:
        hint = "; `make wheel` makes it" if missing[0].suffix == ".whl" else ""
        raise ConfigError(f"{cluster.path}: file_mounts: {missing[0]} does not exist{hint}")
    if token in cluster.mounted and not token.exists():
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))


def check_host(cluster: ClusterFile, host: str) -> None:
    """Log in once. Raises StartError where that fails or the host lacks what Ray needs.

    Ray tries for five minutes before it gives up a host, and never tries a worker again.
    """
    if _ssh(cluster, host, "command -v rsync").returncode != 0:
        raise StartError(f"{host} has no rsync, which Ray needs")


def stop_rays(cluster: ClusterFile, hosts: Sequence[str]) -> list[str]:
    """Stop Ray on hosts whose head has ended, all of it; returns a line for each where that failed.

    `ray down` stops the head's; on hosts that it does not own the workers' lingers for a minute.
    """
    if not hosts:
        return []
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        return [problem for problem in pool.map(partial(_stop_ray, cluster), hosts) if problem is not None]


def _stop_ray(cluster: ClusterFile, host: str) -> str | None:
    try:
        done = _ssh(cluster, host, "bash --login -c -i 'source ~/.bashrc; ray stop --force'")
    except StartError as error:
        return str(error)
    return None if done.returncode == 0 else f"{host}: ray stop: {_last_line(done.stderr)}"


def _ssh(cluster: ClusterFile, host: str, command: str) -> subprocess.CompletedProcess[str]:
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "StrictHostKeyChecking": "no",  # as Ray does it
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    if cluster.ssh_proxy is not None:
        options["ProxyCommand"] = cluster.ssh_proxy
    arguments = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    if cluster.ssh_key is not None:
        arguments += ["-i", str(cluster.ssh_key)]
    target = f"{cluster.ssh_user}@{host}"
    try:
        done = subprocess.run(
            ["ssh", *arguments, target, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"{target} over ssh: no end of `{command}` in {COMMAND_TIMEOUT_S} s") from None
    if done.returncode == SSH_FAILED:
        raise StartError(f"{target} over ssh: {_last_line(done.stderr)}")
    return done


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
