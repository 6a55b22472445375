"""Commands that the operating system fails. Each in a process of its own: what its end says counts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARDED = "import sys; from load.exit import guarded; sys.exit(guarded(lambda: {body}, 'tool'))"
REPORTED = "import sys; from cluster.cli import reported; sys.exit(reported(lambda: {body}))"


def run(code: str, stdout: str = "/dev/null") -> tuple[int, str]:
    """Run code; returns the exit code and stderr."""
    with Path(stdout).open("w") as output:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(("code", "name"), [(GUARDED, "tool"), (REPORTED, "headway")])
def test_a_full_disk_is_one_line(code: str, name: str) -> None:
    full = run(code.format(body="print('figures') or 0"), "/dev/full")
    assert full == (1, f"{name}: No space left on device\n")


def test_a_full_disk_is_told_though_nothing_was_flushed_before_an_exit() -> None:
    code, told = run(GUARDED.format(body="print('figures') or sys.exit(0)"), "/dev/full")
    assert (code, told) == (1, "tool: No space left on device\n")


def test_an_error_that_knows_its_file_is_a_mistake_of_the_caller() -> None:
    code, told = run(GUARDED.format(body="open('/nowhere/x')"))
    assert (code, told) == (2, "tool: /nowhere/x: No such file or directory\n")


def test_ctrl_c_is_no_traceback() -> None:
    assert run(GUARDED.format(body="(_ for _ in ()).throw(KeyboardInterrupt())")) == (1, "")


def test_an_error_that_is_not_the_systems_is_raised() -> None:
    code, told = run(GUARDED.format(body="(_ for _ in ()).throw(TimeoutError())"))
    assert code == 1
    assert told.endswith("TimeoutError\n")


def test_a_reader_that_left_is_told_nothing() -> None:
    code = GUARDED.format(body="print('figures' * 100_000) or 0")
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait(60) == 1
