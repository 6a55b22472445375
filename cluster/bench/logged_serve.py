"""`headway serve` that logs every step of its engines: `python -m cluster.bench.logged_serve FOLDER CONFIG`.

Each replica appends to a file of its own in the folder, one LoggedStep as JSON a line.
"""

import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from cluster import parts
from cluster.bench.step_log import LoggedStep, log_steps
from cluster.cli import reported, serve
from cluster.config import load_config
from cluster.parts import OpenedPump
from replicas.config import EngineConfig
from replicas.progress import Progress


def open_logged_pump(folder: str, config: EngineConfig, progress: Progress) -> OpenedPump:
    """As parts.open_pump, with a log in `folder`."""
    opened = parts.open_pump(config, progress)
    # Unbuffered: nobody says when the last step was. A line costs some microseconds.
    file = open(Path(folder) / f"{os.getpid()}.jsonl", "ab", buffering=0)  # noqa: SIM115
    encode = msgspec.json.Encoder().encode

    def take(step: LoggedStep) -> None:
        file.write(encode(step) + b"\n")

    log_steps(opened.pump.engine, take)
    return opened


def read_logs(folder: Path) -> list[list[LoggedStep]]:
    """Return what each replica has logged."""
    decode = msgspec.json.Decoder(LoggedStep).decode
    files = sorted(folder.glob("*.jsonl"))
    return [[decode(line) for line in file.read_bytes().splitlines()] for file in files]


if __name__ == "__main__":
    from cluster.bench import logged_serve  # under its importable name, so that Ray pickles it by reference

    open_pump = partial(logged_serve.open_logged_pump, sys.argv[1])
    sys.exit(reported(lambda: serve(lambda: load_config(Path(sys.argv[2])), open_pump=open_pump)))
