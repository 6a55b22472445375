import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from load.commands import EXIT_FAILED, EXIT_INVALID, EXIT_MISUSED, add_parsers
from load.echo import Pace
from tests.load.http_server import Answer, answering
from tests.load.wellformed import check_page

FAST = ("--duration-s", "1", "--rate", "20", "--output-tokens", "5", "--max-lateness-ms", "10000")


def load(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser)
    options = parser.parse_args(arguments)
    exit_code: int = options.load(options)
    return exit_code


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(capsys.readouterr().out)
    return fields


@pytest.mark.parametrize("workers", ["1", "2"])
def test_run(echo_url: str, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    assert load("run", "--url", echo_url, *FAST, "--workers", workers, "--json") == 0
    report = printed(capsys)
    assert report["requests"] == report["answered"] == 14
    assert report["output_tokens"] == 14 * 5
    assert report["usage_mismatches"] == 0
    assert report["prompt_token_error"] == 0.0
    assert report["driver"]["workers"] == int(workers)
    assert report["configuration"]["counting"] == "usage"


def test_the_plan_does_not_depend_on_the_number_of_workers(
    echo_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = []
    for workers in ("1", "3"):
        load(
            "run", "--url", echo_url, *FAST, "--input-tokens", "uniform:5:90", "--workers", workers, "--json"
        )
        report = printed(capsys)
        sent.append((report["requests"], report["prompt_tokens"]))
    assert sent[0] == sent[1]


def test_run_writes_every_form(echo_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {form: str(tmp_path / f"report.{form}") for form in ("out", "html", "markdown")}
    outputs = [part for form, path in files.items() for part in (f"--{form}", path)]
    assert load("run", "--url", echo_url, *FAST, *outputs, "--slo", "ttft=5000") == 0
    assert "| TTFT |" in capsys.readouterr().out
    check_page(Path(files["html"]).read_text())
    assert load("report", files["out"], "--markdown", str(tmp_path / "again.md")) == 0
    assert (tmp_path / "again.md").read_text() == Path(files["markdown"]).read_text()
    assert load("compare", files["out"], files["out"], "--html", str(tmp_path / "c.html")) == 0
    check_page((tmp_path / "c.html").read_text())


def test_users_ask_a_given_number_of_times(echo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("run", "--url", echo_url, "--users", "4", "--requests", "17", "--output-tokens", "3",
                "--json", "--max-lateness-ms", "10000") == 0  # fmt: skip
    assert printed(capsys)["requests"] == 17


def test_users_ask_for_a_given_time(echo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("run", "--url", echo_url, "--users", "2", "--duration-s", "0.5", "--output-tokens", "3",
                "--json", "--max-lateness-ms", "10000") == 0  # fmt: skip
    assert printed(capsys)["errors"] == {}


def test_a_trace_is_replayed(echo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("run", "--url", echo_url, "--trace", "mooncake-conversation", "--length-factor", "0.03125",
                "--rate-factor", "20", "--jitter-s", "0.5", "--duration-s", "1", "--max-total-tokens", "500",
                "--max-lateness-ms", "10000", "--json") == 0  # fmt: skip
    report = printed(capsys)
    assert report["requests"] > 20
    assert report["prompt_token_error"] == 0.0


def test_sweep_finds_that_everything_holds(echo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("sweep", "--url", echo_url, "--slo", "e2e=60000", "--duration-s", "0.5",
                "--output-tokens", "2", "--first-rate", "20", "--max-probes", "2",
                "--json", "--max-lateness-ms", "10000") == 0  # fmt: skip
    sweep = printed(capsys)
    assert [probe["rate"] for probe in sweep["probes"]] == [20, 40]
    assert sweep["knee_rps"] == 40


def test_sweep_draws_lengths_from_a_trace(echo_url: str) -> None:
    assert load("sweep", "--url", echo_url, "--slo", "e2e=60000", "--duration-s", "0.5", "--first-rate", "9",
                "--lengths", "azure2023-conv", "--length-factor", "0.01", "--max-probes", "1",
                "--max-lateness-ms", "10000") == 0  # fmt: skip


def test_sweep_says_when_no_rate_holds(echo_url: str) -> None:
    assert load("sweep", "--url", echo_url, "--slo", "ttft=0.001", "--duration-s", "0.5",
                "--output-tokens", "2",
                "--first-rate", "20", "--max-probes", "1") == EXIT_FAILED  # fmt: skip


def test_a_late_driver_is_an_exit_code_of_its_own(echo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("run", "--url", echo_url, *FAST, "--max-lateness-ms", "0.000001") == EXIT_INVALID
    assert "invalid: requests left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rate", "1e9"], "more than the"),
        (["--rate", "-3"], "never negative"),
        (["--rate", "3", "--users", "2"], "exclude each other"),
        (["--trace", "nowhere"], "cannot read the trace"),
        (["--input-tokens", "many"], "uniform:16:512"),
        (["--slo", "ttft"], "ttft=500"),
        (["--slo", "gold:ttft=500"], "gold"),
        (["--rate", "0.0001"], "no request"),
        (["--rate-factor", "2"], "--rate-factor does something with --trace only"),
        (["--users", "2", "--arrivals", "constant"], "without --trace and --users only"),
        (["--trace", "azure2023-conv", "--input-tokens", "9"], "where nothing else gives lengths"),
        (["--cv", "3"], "--arrivals gamma"),
        (["--api-key", "schlüssel"], "no HTTP header can carry"),
        (["--prompts", "/nowhere.jsonl"], "cannot read the prompts"),
        (["--tenants", "/nowhere.yaml"], "nowhere"),
        ([*FAST, "--out", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        ([*FAST, "--html", "/dev/full"], "cannot write /dev/full: No space left on device"),
    ],
)
def test_mistakes_of_the_caller(
    echo_url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert load("run", "--url", echo_url, *arguments) == EXIT_MISUSED
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "where"),
    [('{"prompt": "a"}\n{"prompt": nope}', ":2:"), ("{}", ":1:1:"), ('{"prmpt": 1}', ":1:")],
)
def test_a_prompts_file_with_a_mistake(
    echo_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, where: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    assert load("run", "--url", echo_url, "--prompts", str(path)) == EXIT_MISUSED
    assert f"prompts.jsonl{where}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--trace", "--prompts", "--tenants"])
def test_a_file_that_does_not_end(
    echo_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("load.files.MAX_BYTES", 1 << 20)
    assert load("run", "--url", echo_url, option, "/dev/zero") == EXIT_MISUSED
    assert "/dev/zero: more than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--url", "x", "--workers", "65"),
        ("run", "--url", "x", "--users", "1e9"),
        ("echo", "--port", "70000"),
    ],
)
def test_numbers_beyond_reason(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(*arguments)


def test_the_echo_server_has_a_pace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[object, ...]] = []
    monkeypatch.setattr("load.commands.run_echo", lambda *arguments: served.append(arguments[:3]))
    assert load("echo") == 0
    assert served == [(Pace(ttft_ms=20.0, itl_ms=50.0), "127.0.0.1", 8001)]


def test_a_server_that_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda *_: (200, {})) as target:
        pass
    assert load("run", "--url", f"http://127.0.0.1:{target.port}") == EXIT_MISUSED
    assert "no answer from" in capsys.readouterr().err


def test_a_run_without_an_answer_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse_streams(path: str, body: dict[str, Any], _: str | None) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        return (500, {}) if body.get("stream") else (200, {"choices": []})

    with answering(refuse_streams) as target:
        code = load("run", "--url", f"http://127.0.0.1:{target.port}", *FAST)
    assert code == EXIT_FAILED
    printed = capsys.readouterr()
    assert "http_500 14" in printed.out
    assert "not one of 14 requests was answered" in printed.err


def test_keys_are_not_in_the_report(echo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("run", "--url", echo_url, *FAST, "--api-key", "very-secret", "--json")
    assert "very-secret" not in capsys.readouterr().out


def test_ctrl_c_ends_the_run_and_keeps_what_was_measured(echo_url: str) -> None:
    command = [
        sys.executable,
        "-m",
        "load",
        "run",
        "--url",
        echo_url,
        "--rate",
        "20",
        "--duration-s",
        "600",
        "--json",
    ]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stderr is not None
        # The first line of the view comes once requests have been answered.
        assert b"answered" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    report = json.loads(out)
    assert report["is_interrupted"]
    assert report["answered"] > 0
    assert process.returncode == EXIT_INVALID
