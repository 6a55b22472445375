"""What `headway serve` shows: a bar while it starts, then where it serves."""

import json
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig
from cluster.loading import LoadState


class StartDisplay:
    """A progress bar on a terminal, one line per stage elsewhere; both on stderr."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._shown = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def show(self, doing: str, share: float | None) -> None:
        """Say what is being done now, in a few words, and how much of it is done; a Progress."""
        total = None if share is None else 1.0  # without a total the bar pulses
        self._progress.update(self._task, description=doing, completed=share or 0.0, total=total)
        if doing != self._shown and not self._console.is_terminal:
            print(f"headway: {doing}", file=sys.stderr, flush=True)
        self._shown = doing

    def end(self) -> None:
        """Take the bar away. Idempotent."""
        self._progress.stop()


def error_line(error: BaseException) -> str:
    """One line for stderr, whatever the message holds."""
    return f"headway: {' '.join(str(error).split()) or type(error).__name__}"


def ready_lines(config: ClusterConfig, url: str, state: LoadState) -> str:
    """Where the model is served and with what limits, and a command to try it."""
    card = state.card
    facts = [f"Headway serves {card.name if card else config.engine.model} at {url}"]
    scaling = config.autoscaling
    if scaling is not None:
        facts.append(f"{scaling.min_replicas} to {scaling.max_replicas} replicas")
    elif config.replicas > 1:
        facts.append(f"{config.replicas} replicas")
    if card is not None:
        facts.append(f"{card.num_blocks:,} KV blocks of {card.block_size} tokens")
        facts.append(f"up to {card.max_num_seqs} sequences")
    facts += state.facts
    if state.phases:
        phases = ", ".join(f"{doing} {seconds:.1f}" for doing, seconds in state.phases.items())
        facts.append(f"started in {sum(state.phases.values()):.1f} s ({phases})")
    body = {
        "model": card.name if card else config.engine.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    key = "" if config.access.keys_file is None else ' -H "Authorization: Bearer $KEY"'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    return f"{' · '.join(facts)}\n{curl}"
