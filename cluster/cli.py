"""The `headway` command. Ray, torch and the like are imported only once a command needs them."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cluster.access import check_access, warning
from cluster.arguments import at_least_one, port
from cluster.config import ClusterConfig, load_config
from cluster.dashboards import add_parsers as add_dashboard_parsers
from cluster.dashboards import run as run_dashboards
from cluster.environment import port_problem
from cluster.errors import StartError
from cluster.keys import add_parsers as add_key_parsers
from load.exit import EXIT_FAILED, EXIT_MISUSED, guarded
from replicas.errors import ConfigError, EngineError
from replicas.progress import Progress

if TYPE_CHECKING:
    from cluster.parts import OpenPump


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `headway`; returns the exit code: 0, 1 for a failure, 2 for a mistake of the caller."""
    return reported(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    options = _parser(arguments).parse_args(arguments)
    exit_code: int = options.run(options)
    return exit_code


def reported(run: Callable[[], int]) -> int:
    """Return what `run` does, or tell its error on stderr, in one line, and return the exit code for it."""
    from cluster.terminal import error_line

    try:
        return guarded(run, "headway")
    except EngineError as error:
        print(error_line(error), file=sys.stderr)
        return EXIT_MISUSED
    except StartError as error:
        print(error_line(error), file=sys.stderr)
        return EXIT_FAILED


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway", description="Serve language models with a latency promise per customer tier."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model over HTTP", description=_serve.__doc__))
    keys = commands.add_parser("keys", help="make, list, revoke and rotate API keys")
    add_key_parsers(keys)
    keys.set_defaults(run=_keys)
    add_dashboard_parsers(
        dashboards := commands.add_parser("dashboards", help="bring dashboards and alerts into Grafana")
    )
    dashboards.set_defaults(run=run_dashboards)
    status = commands.add_parser("status", help="watch replicas, tiers, queues and KV of a running server")
    if arguments[:1] == ["status"]:
        from cluster.status import add_arguments as add_status_arguments

        add_status_arguments(status)
    bench = commands.add_parser("bench", help="measure what Headway claims")
    if arguments[:1] == ["bench"]:
        from cluster.bench import add_parsers

        add_parsers(bench)
        bench.set_defaults(run=_bench)
    deploy = commands.add_parser("deploy", help="run a cluster of several hosts, and applications on it")
    if arguments[:1] == ["deploy"]:
        from cluster.deploy.commands import add_parsers as add_deploy_parsers

        add_deploy_parsers(deploy)
        deploy.set_defaults(run=_deploy)
    simulate = commands.add_parser("simulate", help="serve recorded traffic on virtual time, without a model")
    if arguments[:1] == ["simulate"]:
        from cluster.simulation.commands import add_simulate_arguments, run_simulate

        add_simulate_arguments(simulate)
        simulate.set_defaults(run=_bench, bench=run_simulate)
    plan = commands.add_parser("plan", help="from promised latencies to seats, chunk, memory and replicas")
    if arguments[:1] == ["plan"]:
        from cluster.simulation.plan import add_plan_arguments, run_plan

        add_plan_arguments(plan)
        plan.set_defaults(run=_bench, bench=run_plan)
    load = commands.add_parser("load", help="load an OpenAI-compatible server and measure it")
    if arguments[:1] == ["load"]:
        from load.commands import add_parsers as add_load_parsers

        add_load_parsers(load)
        load.set_defaults(run=lambda options: options.load(options))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file; options override it")
    parser.add_argument("--model", help="bundled name, folder, .gguf file, or Hub id")
    parser.add_argument("--replicas", type=at_least_one, metavar="N", help="engines to run")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port to listen on (default 8000)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the engines run")
    parser.add_argument("--address", help="running Ray cluster to use instead of a local one")
    parser.add_argument(
        "--allow-anonymous", action="store_true", help="serve without keys on an address that others reach"
    )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    """Serve a model over HTTP until Ctrl-C, on a Ray of its own that ends with it."""
    return serve(lambda: _configured(options), address=options.address)


def serve(
    configure: Callable[[], ClusterConfig],
    *,
    address: str | None = None,
    open_pump: "OpenPump | None" = None,
) -> int:
    """Serve until SIGINT or SIGTERM and end everything that was started; returns the exit code.

    `open_pump` replaces the engine over the configured model (benchmarks, tests).
    """
    from cluster import parts
    from cluster.serving import StopRequested, serving
    from cluster.terminal import StartDisplay, ready_lines

    try:
        config = configure()
        check_access(config)
        if config.tracing.endpoint is not None:
            from cluster.tracing import open_exporter

            open_exporter(config.tracing.endpoint)  # says at once when its package is missing
        with StartDisplay() as display:
            config = _with_located_model(config, display.show)
            problem = port_problem(config.http.host, config.http.port)
            if problem is not None and address is None:
                raise ConfigError(problem)
            with serving(config, display, address=address, open_pump=open_pump or parts.open_pump) as up:
                display.end()
                print(ready_lines(config, up.url, up.state), flush=True)
                if (loud := warning(config)) is not None:
                    print(loud, file=sys.stderr, flush=True)
                while True:
                    signal.pause()
    except (StopRequested, KeyboardInterrupt):
        return 0


def _configured(options: argparse.Namespace) -> ClusterConfig:
    config = load_config(options.config) if options.config else ClusterConfig()
    given = {name: value for name, value in vars(options).items() if value is not None}
    engine = {name: given[name] for name in ("model", "device") if name in given}
    http = {name: given[name] for name in ("host", "port") if name in given}
    access = {"allow_anonymous": True} if options.allow_anonymous else {}
    replace = msgspec.structs.replace
    return replace(
        config,
        replicas=given.get("replicas", config.replicas),
        engine=replace(config.engine, **engine),
        http=replace(config.http, **http),
        access=replace(config.access, **access),
    )


def _with_located_model(config: ClusterConfig, progress: Progress) -> ClusterConfig:
    """Find (and convert) the model before Ray starts: a wrong name then costs no time."""
    from replicas.model_source import BUNDLED, locate

    model = config.engine.model
    locate(model, progress)
    path = Path(model).expanduser()
    if model not in BUNDLED and path.exists():
        model = str(path.resolve())  # replicas run in other folders
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, model=model))


def _keys(options: argparse.Namespace) -> int:
    print("\n".join(options.keys(options)))
    return 0


def _deploy(options: argparse.Namespace) -> int:
    options.deploy(options)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from cluster.bench.report import print_report
    from load.errors import LoadError

    try:
        print_report(options.bench(options), options.json)
    except LoadError as error:
        raise ConfigError(str(error)) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
