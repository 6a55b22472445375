"""Run in a process of their own: the functions under test take over the whole process."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    """Run `code` with the module's names in it; returns what it prints."""
    prologue = "import os, subprocess, sys\nfrom cluster.processes import *\n"
    completed = subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return completed.stdout


def test_orphans_are_found_and_ended() -> None:
    printed = run("""
        adopt_orphans()
        # The child ends at once and leaves a grandchild behind.
        script = "sleep 1000 > /dev/null & echo $!"
        orphan = int(subprocess.check_output(["sh", "-c", script]))
        print(descendants() == [orphan])
        end_descendants(5.0)
        print(descendants(), os.path.exists(f"/proc/{orphan}"))
    """)
    assert printed == "True\n[] False\n"


def test_a_process_that_ignores_the_request_is_killed() -> None:
    printed = run("""
        deaf = "trap '' TERM; echo 1; while true; do sleep 0.1; done"
        child = subprocess.Popen(["sh", "-c", deaf], stdout=subprocess.PIPE)
        child.stdout.readline()
        end_descendants(0.2)
        print(os.path.exists(f"/proc/{child.pid}"))
    """)
    assert printed == "False\n"


def test_the_processes_of_others_are_left_alone() -> None:
    other = subprocess.Popen(["sleep", "1000"])
    try:
        assert run("adopt_orphans(); end_descendants(0.1); print(descendants())") == "[]\n"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
