"""`headway deploy`: the commands. Each sets `deploy`, a function of the options."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cluster.arguments import at_least_one
from cluster.config import HttpConfig
from cluster.deploy.cluster_file import ClusterFile, read_cluster
from cluster.deploy.hosts import check_host, check_machine, check_mounts, stop_rays
from cluster.deploy.launcher import SAID, Launcher
from cluster.deploy.node import node_folder, prepare_node
from cluster.errors import StartError
from cluster.terminal import StartDisplay

HOSTS_TIMEOUT_S: Final = 900
"""A cloud's machines take minutes to come, and as long to install."""
APP_TIMEOUT_S: Final = 1800
"""Large weights come from far away."""


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the commands to `headway deploy`."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument("cluster", type=Path, metavar="CLUSTER.yaml", help="a cluster file of `ray up`")
    parents = [cluster]
    commands.add_parser("up", help="start or update a cluster", parents=parents).set_defaults(deploy=up)
    app = commands.add_parser("app", help="run the applications of a Serve config file", parents=parents)
    app.add_argument("app", type=Path, metavar="APP.yaml", help="a config file of `serve deploy`")
    app.set_defaults(deploy=run_app)
    status = commands.add_parser("status", help="hosts, applications, replicas", parents=parents)
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.set_defaults(deploy=show_status)
    drain = commands.add_parser("drain", help="have a host's replicas go elsewhere", parents=parents)
    drain.set_defaults(deploy=drain_host)
    _add_host(drain)
    commands.add_parser("down", help="stop all of a cluster", parents=parents).set_defaults(deploy=down)
    env = commands.add_parser(
        "env", help="prepare a node; prints what its shell must export before `ray start`"
    )
    defaults = HttpConfig()
    for option, default, text in (
        ("--max-connections", defaults.max_connections, "client connections that HAProxy accepts"),
        ("--haproxy-threads", defaults.num_threads, "HAProxy's threads"),
        ("--max-stream-s", defaults.max_stream_s, "longest life of an answer in seconds"),
    ):
        env.add_argument(option, type=at_least_one, default=default, help=f"{text} (default {default})")
    env.set_defaults(deploy=node_environment)
    _add_head(commands.add_parser("head", help="what the other commands run on the head"))


def _add_head(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    wait = commands.add_parser("wait", help="until so many hosts are up")
    wait.add_argument("number", type=at_least_one, metavar="N")
    wait.set_defaults(deploy=_head_wait)
    apply = commands.add_parser("apply", help="run the applications of a Serve config file")
    apply.add_argument("app", type=Path, metavar="APP.yaml")
    apply.set_defaults(deploy=_head_apply)
    status = commands.add_parser("status", help="hosts, applications, replicas")
    status.add_argument("--json", action="store_true")
    status.set_defaults(deploy=_head_status)
    drain = commands.add_parser("drain", help="have a host's replicas go elsewhere")
    drain.set_defaults(deploy=_head_drain)
    _add_host(drain)


def _add_host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("host", metavar="HOST", help="its address, as `status` tells it")
    parser.add_argument(
        "--deadline-s", type=at_least_one, metavar="S", help="the host will be taken away in so many seconds"
    )


def up(options: argparse.Namespace) -> None:
    """Start or update a cluster, and wait for all of its first hosts."""
    cluster = read_cluster(options.cluster)
    check_mounts(cluster, Path("~/.ray/auth_token").expanduser())
    with _launcher(cluster, "checking the hosts", cluster.hosts) as launcher:
        launcher.up()
        launcher.on_head("wait", str(cluster.num_hosts))
    print(f"{cluster.name} is up: {cluster.num_hosts} hosts")
    print(f"headway deploy app {cluster.path} APP.yaml")


def run_app(options: argparse.Namespace) -> None:
    """Run the applications of a Serve config file, and no others; wait until they run."""
    from cluster.deploy.serve_file import read_serve_file

    cluster = read_cluster(options.cluster)
    read_serve_file(options.app)
    with _launcher(cluster, "sending the application", cluster.hosts[:1]) as launcher:
        launcher.copy_to_head(options.app, "~/headway-app.yaml")
        said = launcher.on_head("apply", "headway-app.yaml")
    print("\n".join(line for line in said if " at http" in line))


def show_status(options: argparse.Namespace) -> None:
    """Print what the cluster consists of and what it runs."""
    cluster = read_cluster(options.cluster)
    with _launcher(cluster, "asking the head", cluster.hosts[:1]) as launcher:
        said = launcher.on_head("status", *(["--json"] if options.json else []))
    print("\n".join(said))


def drain_host(options: argparse.Namespace) -> None:
    """Have all replicas of a host go elsewhere, and wait until they have gone."""
    cluster = read_cluster(options.cluster)
    deadline = [] if options.deadline_s is None else ["--deadline-s", str(options.deadline_s)]
    with _launcher(cluster, "draining", cluster.hosts[:1]) as launcher:
        launcher.on_head("drain", options.host, *deadline)
    print(f"{options.host} runs no replica")


def down(options: argparse.Namespace) -> None:
    """Stop all of a cluster. Raises StartError when a worker cannot be asked; the others are stopped."""
    cluster = read_cluster(options.cluster)
    with _launcher(cluster, "stopping", cluster.hosts[:1]) as launcher:
        launcher.down()
        left = [] if cluster.is_docker else stop_rays(cluster, cluster.hosts[1:])
    if left:
        raise StartError(f"{cluster.name} is down, but for {'; '.join(left)}")
    print(f"{cluster.name} is down")


def node_environment(options: argparse.Namespace) -> None:
    """Prepare this node and print the environment in which `ray start` must run."""
    http = HttpConfig(
        max_connections=options.max_connections,
        num_threads=options.haproxy_threads,
        max_stream_s=options.max_stream_s,
    )
    print(prepare_node(http, node_folder(os.geteuid())))


@contextlib.contextmanager
def _launcher(cluster: ClusterFile, doing: str, hosts: Sequence[str]) -> Iterator[Launcher]:
    """Check this machine and `hosts`, then give a Launcher; its log is kept when something fails."""
    with StartDisplay() as display:
        display.show(doing, None)
        check_machine(cluster)
        for host in hosts:
            check_host(cluster, host)
        with tempfile.NamedTemporaryFile("w", prefix="headway-deploy-", suffix=".log", delete=False) as log:
            yield Launcher(cluster, log, display.show)
        Path(log.name).unlink()


def _say(line: str) -> None:
    print(f"{SAID}{line}", flush=True)


def _head_wait(options: argparse.Namespace) -> None:
    from cluster.deploy.head import Head, wait_for_hosts

    wait_for_hosts(options.number, HOSTS_TIMEOUT_S, _say, hosts=Head().hosts)


def _head_apply(options: argparse.Namespace) -> None:
    from cluster.deploy.head import Head, wait_until_running
    from cluster.deploy.serve_file import application_names, read_serve_file

    document = read_serve_file(options.app)
    head = Head()
    head.apply(document)
    names = application_names(document)
    serving = wait_until_running(names, APP_TIMEOUT_S, _say, details=head.details)
    for line in serving.addresses(head.address()):
        _say(line)


def _head_status(options: argparse.Namespace) -> None:
    from cluster.deploy.head import ClusterState, Head

    head = Head()
    state = ClusterState(hosts=head.hosts(), serving=head.details())
    for line in [msgspec.json.encode(state).decode()] if options.json else state.lines():
        _say(line)


def _head_drain(options: argparse.Namespace) -> None:
    from cluster.deploy.head import Head, wait_until_empty

    head = Head()
    head.drain(options.host, options.deadline_s)
    wait_until_empty(options.host, APP_TIMEOUT_S, _say, details=head.details)
