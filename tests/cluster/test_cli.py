"""The command line up to the moment when Ray would start."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def headway(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from cluster.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


def refusal(*arguments: str, folder: Path = ROOT) -> str:
    """Run a command that must fail as a mistake of its caller; returns the one line that says why."""
    done = headway(*arguments, folder=folder)
    assert done.returncode == 2, done
    assert done.stdout == ""
    *progress, line = done.stderr.splitlines()
    assert len(progress) <= 1, done.stderr
    return line


def test_help_names_the_commands() -> None:
    done = headway("--help")
    assert done.returncode == 0
    for command in ("serve", "keys", "bench", "load"):
        assert command in done.stdout


def test_the_load_tool_is_a_command() -> None:
    done = headway("load", "run", "--url", "http://127.0.0.1:9", "--requests", "1")
    assert done.returncode == 2, done
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys\nfrom cluster.cli import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted(sys.modules.keys() & {'ray', 'torch', 'transformers', 'numba'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("serve", "--replicas", "0"),
        ("serve", "--replicas", "two"),
        ("serve", "--port", "70000"),
        ("serve", "--port", "²"),
        ("serve", "--device", "tpu"),
        ("serve", "--colour", "red"),
        ("bench",),
        ("bench", "scheduler", "--seqs", "0"),
    ],
)
def test_a_bad_flag_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    done = headway(*arguments)
    assert done.returncode == 2
    assert "headway" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_typo_in_the_config_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("engine: {max_num_seq: 3}\n")
    line = refusal("serve", "--config", "c.yaml", folder=tmp_path)
    assert line == "headway: c.yaml: engine.max_num_seq: unknown key; did you mean max_num_seqs?"


def test_a_missing_config_is_one_line(tmp_path: Path) -> None:
    assert (
        refusal("serve", "--config", "c.yaml", folder=tmp_path)
        == "headway: c.yaml: No such file or directory"
    )


def test_a_missing_gguf_is_one_line(tmp_path: Path) -> None:
    assert refusal("serve", "--model", "m.gguf", folder=tmp_path) == "headway: model 'm.gguf': no such file"


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    assert refusal("serve", "--model", str(tmp_path)).startswith(f"headway: model {tmp_path}: cannot read")


def test_a_corrupt_gguf_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    assert refusal("serve", "--model", "m.gguf", folder=tmp_path).startswith("headway: model m.gguf:")


def test_a_benchmark_without_its_model_is_one_line(tmp_path: Path) -> None:
    line = refusal("bench", "engine", "--model", str(tmp_path))
    assert line.startswith(f"headway: model {tmp_path}: cannot read")


@pytest.mark.parametrize(
    "arguments",
    [
        ("routing", "--trace", "missing"),  # OSError
        ("fidelity", "--trace", "missing"),  # LoadError
    ],
)
def test_a_benchmark_without_its_file_is_one_line(arguments: tuple[str, ...]) -> None:
    assert refusal("bench", *arguments).startswith("headway: ")


def test_a_taken_port_is_one_line_before_ray_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal("serve", "--port", str(port), folder=tmp_path)
    assert line == f"headway: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_an_open_server_on_a_public_address_is_one_line_before_anything_starts() -> None:
    line = refusal("serve", "--host", "0.0.0.0")
    assert line.startswith("headway: no keys are configured: everybody who reaches 0.0.0.0")
    assert "--allow-anonymous" in line
