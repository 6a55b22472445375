"""`headway bench overhead`: what HTTP, router, Ray and the wire cost on top of the bare engine.

Three measurements in one run, same streams and lengths: the bare engine; the whole stack around the same
engine; the whole stack around an engine without a model (2 ms steps), where everything but the forward
pass competes for the cores.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import urllib.request

import psutil

from cluster.arguments import at_least_one
from cluster.bench.engine import add_model_arguments
from cluster.bench.http_drive import HttpDrive, drive_http
from cluster.bench.report import commit, percentile, progress
from cluster.bench.server import running_server, served_model
from cluster.bench.workload import fixed_length_request, random_prompt
from cluster.errors import StartError
from replicas.api import GenerateRequest

NAME = "overhead"
HELP = "tokens/s through HTTP and Ray against the bare engine, and the stack's own limits without a model"
VOCAB_SIZE = 1000
ROUTER_TITLE = "Router"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--streams", type=at_least_one, default=32)
    parser.add_argument("--input-tokens", type=at_least_one, default=16)
    parser.add_argument("--output-tokens", type=at_least_one, default=32, help="per stream, with the model")
    parser.add_argument(
        "--null-output-tokens", type=at_least_one, default=400, help="per stream, without a model"
    )
    parser.add_argument("--null-only", action="store_true", help="leave out the two runs with the model")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    report: dict[str, object] = {}
    if not args.null_only:
        engine_tokens_per_s = _bare_engine(args)
        progress(f"bare engine: {engine_tokens_per_s:.1f} tokens/s")
        with running_server(_document(args), ["cluster.cli", "serve", "--config"]) as server:
            http = _measure(server.url, args, args.output_tokens)
        progress(f"through HTTP: {http.output_tokens_per_s:.1f} tokens/s")
        report |= {
            "engine_tokens_per_s": engine_tokens_per_s,
            "http_tokens_per_s": http.output_tokens_per_s,
            "ratio": http.output_tokens_per_s / engine_tokens_per_s,
            "http_ttft_ms_p50": percentile(http.ttft_ms, 50),
            "http_gap_ms_p50": percentile(http.gap_ms, 50),
            "http_gap_ms_p99": percentile(http.gap_ms, 99),
        }
    with running_server(_document(args), ["cluster.bench.null_serve"]) as server:
        router = _find_router(server.process)
        cpu_before = _cpu_s(router)
        null = _measure(server.url, args, args.null_output_tokens)
        router_cpu_s = _cpu_s(router) - cpu_before
        transport_ms = _stats(server.url)["transport_ms"]
    return report | {
        "null_runner_tokens_per_s": null.output_tokens_per_s,
        "null_gap_ms_p50": percentile(null.gap_ms, 50),
        "null_gap_ms_p99": percentile(null.gap_ms, 99),
        "router_cpu_us_per_token": router_cpu_s * 1e6 / null.output_tokens,
        "engine_to_frame_ms_p50": transport_ms["engine_to_frame"]["p50"],
        "engine_to_frame_ms_p99": transport_ms["engine_to_frame"]["p99"],
        "frame_to_router_ms_p50": transport_ms["frame_to_router"]["p50"],
        "frame_to_router_ms_p99": transport_ms["frame_to_router"]["p99"],
        "streams": args.streams,
        "input_tokens": args.input_tokens,
        "output_tokens_per_stream": args.output_tokens,
        "null_output_tokens": null.output_tokens,
        "model": args.model,
        "seed": args.seed,
        "commit": commit(),
    }


def _requests(args: argparse.Namespace, num_output_tokens: int, seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    return [
        fixed_length_request(i, random_prompt(args.input_tokens, VOCAB_SIZE, rng), num_output_tokens)
        for i in range(args.streams)
    ]


def _measure(url: str, args: argparse.Namespace, num_output_tokens: int) -> HttpDrive:
    """One round that warms every path up, then the one that counts, with other prompts."""
    model = served_model(url)
    drive_http(url, model, _requests(args, 4, args.seed + 1), args.streams)
    requests = _requests(args, num_output_tokens, args.seed)
    measured = drive_http(url, model, requests, args.streams)
    expected = args.streams * num_output_tokens
    assert measured.output_tokens == expected, f"{measured.output_tokens} tokens came, {expected} were asked"
    return measured


def _bare_engine(args: argparse.Namespace) -> float:
    """Run `headway bench engine` in a process of its own, as the replica has one."""
    command = [sys.executable, "-m", "cluster.cli", "bench", "engine", "--json"]
    command += ["--model", args.model, "--attention", args.attention, "--device", args.device]
    command += ["--numerics", args.numerics] if args.numerics else []
    command += ["--num-threads", str(args.num_threads)] if args.num_threads else []
    command += ["--requests", str(args.streams), "--concurrency", str(args.streams), "--sigma", "0"]
    command += ["--input-tokens", str(args.input_tokens), "--output-tokens", str(args.output_tokens)]
    command += ["--seed", str(args.seed)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if finished.returncode:
        raise StartError(f"the bare engine ended with exit code {finished.returncode}")
    tokens_per_s: float = json.loads(finished.stdout)["output_tokens_per_s"]
    return tokens_per_s


def _document(args: argparse.Namespace) -> dict[str, object]:
    """The configuration of the bare engine, for a server."""
    engine = {
        "model": args.model,
        "device": args.device,
        "attention": args.attention,
        "max_num_seqs": args.streams,
    }
    engine |= {"numerics": args.numerics} if args.numerics else {}
    engine |= {"num_threads": args.num_threads} if args.num_threads else {}
    return {"engine": engine}


def _find_router(server: psutil.Process) -> psutil.Process:
    for process in server.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if ROUTER_TITLE in " ".join(process.cmdline()):
                return process
    raise RuntimeError("no router process below the server")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _stats(url: str) -> dict[str, dict[str, dict[str, float]]]:
    with urllib.request.urlopen(f"{url}/stats", timeout=10) as answer:
        stats: dict[str, dict[str, dict[str, float]]] = json.load(answer)
    return stats
