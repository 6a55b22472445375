"""`headway status`: several routers make one picture."""

import io
import socket
from typing import Any

import pytest
from rich.console import Console

from cluster.cli import main
from cluster.status import FORGET_S, StatusError, Watch, drawn
from router.histogram import ITL_EDGES_MS, WAIT_EDGES_MS, Histogram

LOAD = {"num_running": 2, "num_waiting": 1, "max_num_seqs": 4, "num_blocks": 100, "free_blocks": 75}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stats(router: str, itl_ms: float, times: int, **changes: Any) -> dict[str, Any]:
    itl, ttft = Histogram(ITL_EDGES_MS), Histogram(WAIT_EDGES_MS)
    itl.observe(itl_ms, times)
    tier = {
        "ttft_target_ms": 100.0,
        "itl_target_ms": 30.0,
        "ttft_counts": ttft.counts,
        "itl_counts": itl.counts,
        "kept": 3,
        "broken": 1,
        "num_queued": 2,
        "oldest_s": 0.5,
        "open_gap_ms": 7.0,
    }
    replica = LOAD | {"step_ms": 12.0, "overloaded": False}
    return {"router": router, "replicas": {"R1": replica}, "tiers": {"gold": tier | changes}}


def watch(*answers: dict[str, Any]) -> tuple[Watch, list[dict[str, Any]], Clock]:
    """One whose routers answer in turns; the list may be changed."""
    given, clock, count = list(answers), Clock(), iter(range(10_000))
    return Watch(lambda: given[next(count) % len(given)], clock), given, clock


def test_counts_of_all_routers_add_up() -> None:
    looking, _, _ = watch(stats("a", 12.0, 90), stats("b", 45.0, 10, oldest_s=9.0))
    seen = looking.look().as_json()
    assert seen["routers"] == 2
    gold = seen["tiers"]["gold"]
    assert 40 < gold["itl_ms_p99"] <= 50
    assert 10 < gold["itl_ms_p50"] <= 15
    assert (gold["attainment"], gold["answers"]) == (0.75, 8)
    assert seen["queues"]["gold"] == {"num_requests": 4, "oldest_s": 9.0}
    assert seen["kv"] == {"used_blocks": 25, "blocks": 100, "used_fraction": 0.25}
    assert list(seen["replicas"]) == ["R1"]


def test_later_looks_tell_of_what_came_in_between() -> None:
    looking, answers, _ = watch(stats("a", 12.0, 90))
    looking.look()
    answers[0] = stats("a", 12.0, 90)
    answers[0]["tiers"]["gold"]["itl_counts"][-1] += 5
    gold = looking.look().tiers["gold"]
    assert gold.itl.num_observed == 5
    assert gold.itl.quantile(0.5) == ITL_EDGES_MS[-1]


def test_a_router_that_is_not_heard_of_is_forgotten() -> None:
    looking, answers, clock = watch(stats("a", 12.0, 1), stats("b", 12.0, 1))
    assert looking.look().num_routers == 2
    answers[:] = [stats("a", 12.0, 1)]
    clock.now += FORGET_S
    assert looking.look().num_routers == 2
    clock.now += 1.0
    assert looking.look().num_routers == 1


def test_the_tables_show_targets_queues_and_kv() -> None:
    looking, _, _ = watch(stats("a", 45.0, 10))
    console = Console(file=io.StringIO(), width=140)
    console.print(drawn(looking.look()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "75.0%" in text
    assert "30 ms" in text
    assert "KV 25% in use" in text


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert main(["status", "--json", "--url", url]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"headway: {url} does not answer")
    assert error.count("\n") == 1


def test_what_asking_raises_is_passed_on() -> None:
    def ask() -> dict[str, Any]:
        raise StatusError("no")

    with pytest.raises(StatusError):
        Watch(ask, Clock()).look()
