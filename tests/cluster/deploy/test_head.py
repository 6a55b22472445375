"""Waiting on the head, with a cluster that changes as the test says."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cluster.errors import StartError

# Importing ray.serve warns; so what imports it is imported inside.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def head() -> Any:
    from cluster.deploy import head

    return head


class Clock:
    """Time passes by sleeping only."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def hosts(head: Any, *addresses: str) -> tuple[Any, ...]:
    return tuple(head.Host(address=address, node_id="", num_cpus=2, num_gpus=0) for address in addresses)


def serving(head: Any, status: str, *states: str, message: str = "") -> Any:
    replicas = [{"replica_id": str(n), "state": state, "node_ip": "b"} for n, state in enumerate(states)]
    application = {
        "status": status,
        "message": message,
        "route_prefix": "/a",
        "deployments": {"Replica": {"status": "UPDATING", "replicas": replicas}},
    }
    document = {"http_options": {"host": "0.0.0.0", "port": 8000}, "applications": {"a": application}}
    return msgspec.convert(document, head.Serving)


def test_hosts_are_waited_for_and_each_change_is_said(head: Any) -> None:
    states = iter([hosts(head, "a"), hosts(head, "a"), hosts(head, "a", "b")])
    said: list[str] = []
    head.wait_for_hosts(
        2, 60, said.append, hosts=lambda: next(states), clock=Clock().time, sleep=lambda _: None
    )
    assert said == ["1 of 2 hosts are up", "2 hosts are up"]


def test_hosts_that_never_come_are_counted(head: Any) -> None:
    clock = Clock()
    with pytest.raises(StartError, match=r"^1 of 2 hosts are up after 60 s"):
        head.wait_for_hosts(
            2, 60, lambda _: None, hosts=lambda: hosts(head, "a"), clock=clock.time, sleep=clock.sleep
        )


def test_applications_are_waited_for_and_each_change_is_said(head: Any) -> None:
    states = iter(
        [
            head.Serving(),
            serving(head, "DEPLOYING", "STARTING", "STARTING"),
            serving(head, "DEPLOYING", "STARTING", "RUNNING"),
            serving(head, "RUNNING", "RUNNING", "RUNNING"),
        ]
    )
    said: list[str] = []
    up = head.wait_until_running(
        ["a"], 60, said.append, details=lambda: next(states), clock=Clock().time, sleep=lambda _: None
    )
    assert said == [
        "a: not started",
        "a: deploying, Replica 0/2",
        "a: deploying, Replica 1/2",
        "a: running, Replica 2/2",
    ]
    assert up.addresses("10.0.0.1") == ["a at http://10.0.0.1:8000/a"]


def test_an_application_that_cannot_start_is_told_with_its_reason(head: Any) -> None:
    failed = serving(head, "DEPLOY_FAILED", message="Traceback\n  File x\nConfigError: no such model\n")
    with pytest.raises(StartError, match=r"^a: ConfigError: no such model$"):
        head.wait_until_running(["a"], 60, lambda _: None, details=lambda: failed)


def test_an_application_that_never_runs_is_named(head: Any) -> None:
    def forever() -> Iterator[Any]:
        return itertools.repeat(serving(head, "DEPLOYING", "STARTING"))

    clock = Clock()
    states = forever()
    with pytest.raises(StartError, match=r"^not running after 60 s: a$"):
        head.wait_until_running(
            ["a"], 60, lambda _: None, details=lambda: next(states), clock=clock.time, sleep=clock.sleep
        )


def test_the_state_says_what_runs_where(head: Any) -> None:
    state = head.ClusterState(
        hosts=hosts(head, "a", "b"), serving=serving(head, "RUNNING", "RUNNING", "STARTING")
    )
    assert state.lines() == [
        "a: 2 CPUs, 0 GPUs, runs no replica",
        "b: 2 CPUs, 0 GPUs, runs a/Replica",
        "a: running, Replica 1/2",
    ]


def test_a_drained_host_is_waited_for_until_nothing_is_on_it(head: Any) -> None:
    states = [("RUNNING", "RUNNING"), ("STOPPING", "PENDING_MIGRATION"), ("STOPPING",), ()]
    servings = iter([serving(head, "RUNNING", *some) for some in states])
    said: list[str] = []
    head.wait_until_empty(
        "b", 60, said.append, details=lambda: next(servings), clock=Clock().time, sleep=lambda _: None
    )
    assert said == ["b: a/Replica, a/Replica still there", "b: a/Replica still there"]


def test_a_host_whose_replica_finds_no_other_place_is_named(head: Any) -> None:
    clock = Clock()
    full = serving(head, "RUNNING", "PENDING_MIGRATION")
    with pytest.raises(StartError, match="after 60 s still on b: a/Replica; no other host has room"):
        head.wait_until_empty(
            "b", 60, lambda _: None, details=lambda: full, clock=clock.time, sleep=clock.sleep
        )


def test_only_a_worker_that_is_there_is_drained(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.Head, "hosts", lambda _: hosts(head, "a", "b", "c"))
    monkeypatch.setattr(head.Head, "address", lambda _: "a")
    for address in ("a", "d"):
        with pytest.raises(StartError, match=f"{address} is none of the hosts that can be drained: b, c"):
            head.Head().drain(address, None)
