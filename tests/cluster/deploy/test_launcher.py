"""Launcher: a `ray` command's talk becomes stages, our own lines, or one reason."""

import io
import sys
from pathlib import Path

import pytest

from cluster.deploy.launcher import Launcher, failure
from cluster.errors import StartError
from tests.cluster.deploy.test_hosts import cluster

RAY = """
import os, sys
print("asked:", " ".join(sys.argv[1:]), os.environ.get("RAY_UP_enable_autoscaler_v2"))
print("\\x1b[36m[3/7]\\x1b[39m Processing file mounts")
print("headway: 2 of 3 hosts are up\\r")
"""


def launcher(script: str, **fields: object) -> tuple[Launcher, io.StringIO, list[str]]:
    log = io.StringIO()
    log.name = "the.log"
    shown: list[str] = []
    made = Launcher(
        cluster(**fields), log, lambda doing, _: shown.append(doing), (sys.executable, "-c", script)
    )
    return made, log, shown


def test_stages_and_our_own_lines_are_shown_and_all_is_logged() -> None:
    ray, log, shown = launcher(RAY)
    ray.up()
    assert shown == ["Processing file mounts", "2 of 3 hosts are up"]
    assert log.getvalue().startswith("asked: up --yes --no-config-cache c.yaml 0\n")


def test_only_hosts_that_are_there_already_need_the_old_autoscaler() -> None:
    ray, log, _ = launcher(RAY, is_local=False)
    ray.up()
    assert log.getvalue().startswith("asked: up --yes --no-config-cache c.yaml None\n")


def test_the_head_is_asked_in_the_nodes_environment() -> None:
    ray, log, _ = launcher(RAY)
    assert ray.on_head("apply", "a b") == ["2 of 3 hosts are up"]
    assert "asked: exec c.yaml . ~/.headway-env && headway deploy head apply 'a b'" in log.getvalue()


def test_files_and_the_end_are_rays_own_commands() -> None:
    ray, log, _ = launcher(RAY)
    ray.copy_to_head(Path("a.yaml"), "~/b.yaml")
    ray.down()
    assert "rsync-up c.yaml a.yaml ~/b.yaml" in log.getvalue()
    assert "down --yes c.yaml" in log.getvalue()


def test_what_our_command_said_last_is_the_reason() -> None:
    ray, _, _ = launcher("print('headway: a: no such model'); print('Error: 1'); raise SystemExit(1)")
    with pytest.raises(StartError, match=r"^ray exec: a: no such model \(its whole output: the\.log\)$"):
        ray.on_head("apply", "a")


STAMP = "2026-11-29 22:04:10,917\tINFO updater.py:490 -- "
END = "Shared connection to 10.0.0.1 closed."


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [
                STAMP,
                "oops, no disk space",
                END,
                "click.ClickException: SSH command failed.",
                "Error: no head",
            ],
            "oops",
        ),
        (["bash: x: not found", END, "Error: Command failed:", "ssh -tt ..."], "bash: x: not found"),
        ([STAMP, END, "Error: Command failed:"], "Error: Command failed:"),
        (["up 4 days", END, "RuntimeError: Head node of cluster (x) not found!"], "RuntimeError: Head node"),
        (["Failed to setup head node."], "Failed to setup head node."),
        ([], "no output"),
    ],
)
def test_the_reason_is_the_last_word_of_the_command_that_failed_or_of_ray(
    lines: list[str], reason: str
) -> None:
    assert failure(lines).startswith(reason)
