"""Launcher: Ray's own commands on a cluster file, as processes, with their long talk in a log file."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

from cluster.deploy.cluster_file import ClusterFile
from cluster.errors import StartError

SAID: Final = "headway: "
"""How our own command on the head begins its lines, among all that ssh and Ray print."""
NODE_ENVIRONMENT: Final = "~/.headway-env"
"""Where the cluster files' start commands put what `headway deploy env` prints."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAGE: Final = re.compile(r"(?:<\d+/\d+>|\[\d+/\d+\]) (.+)")
_OWN_LINE: Final = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\s+[A-Z]+ |Warning: Permanently added")
"""What Ray and ssh print about themselves; the rest is what commands on the hosts print."""


class Launcher:
    """Runs one `ray` command at a time. Every method raises StartError with the last word of a failed one."""

    def __init__(
        self,
        cluster: ClusterFile,
        log: IO[str],
        show: Callable[[str, None], None],
        ray: Sequence[str] = (sys.executable, "-m", "ray.scripts.scripts"),
    ) -> None:
        self._ray = ray
        self._cluster = cluster
        self._log = log
        self._show = show

    def up(self) -> None:
        """Start or update the head; workers follow by themselves."""
        self._run("up", "--yes", "--no-config-cache", str(self._cluster.path))

    def on_head(self, *arguments: str) -> list[str]:
        """Run `headway deploy head ARGUMENTS` on the head; returns the lines it said."""
        command = f". {NODE_ENVIRONMENT} && headway deploy head {shlex.join(arguments)}"
        return self._run("exec", str(self._cluster.path), command)

    def copy_to_head(self, file: Path, target: str) -> None:
        self._run("rsync-up", str(self._cluster.path), str(file), target)

    def down(self) -> None:
        """Stop the head, and the machines if they were made by `up`."""
        self._run("down", "--yes", str(self._cluster.path))

    def _run(self, *arguments: str) -> list[str]:
        lines: list[str] = []
        said: list[str] = []
        with subprocess.Popen(
            [*self._ray, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment(),
        ) as process:
            assert process.stdout is not None
            for raw in process.stdout:
                self._log.write(raw)
                self._log.flush()
                line = _COLOURS.sub("", raw).strip()
                if line.startswith(SAID):
                    said.append(line.removeprefix(SAID))
                    self._show(said[-1], None)
                elif stage := _STAGE.search(line):
                    self._show(stage[1].rstrip(". "), None)
                if line:
                    lines.append(line)
        if process.returncode != 0:
            reason = said[-1] if said else failure(lines)
            raise StartError(f"ray {arguments[0]}: {reason} (its whole output: {self._log.name})")
        return said

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "200"}
        if self._cluster.is_local:
            # Version 2 starts all workers but one on hosts that are there already (ray#57153).
            environment["RAY_UP_enable_autoscaler_v2"] = "0"
        return environment


def failure(lines: Sequence[str]) -> str:
    """The line of a `ray` command's output that most likely says why it failed.

    When a command on a host has failed, its last word, which precedes the end of the last connection.
    """
    errors = [line for line in lines if "Error" in line]
    if any("ommand failed" in line for line in lines):
        ends = [number for number, line in enumerate(lines) if line.startswith("Shared connection to ")]
        last_words = lines[ends[-1] - 1] if ends and ends[-1] > 0 else ""
        if last_words and not _OWN_LINE.match(last_words):
            return last_words[:500]
    return (errors or list(lines) or ["no output"])[-1][:500]
