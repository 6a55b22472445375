"""The prediction against Serve's own scheduler, which is given the same books."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import (
    DeploymentDownscaleRequest,
    DeploymentScheduler,
    SpreadDeploymentSchedulingPolicy,
)

from cluster.serve_victim import Application, Controller, Deployment, Placed, Placement, next_to_go

HEAD = "head"
NODES = (HEAD, "a", "b", "c")
DEPLOYMENTS = ("Ledger", "Replica", "Router")


class NodeInfo:
    """What the scheduler asks of the cluster."""

    def get_node_labels(self, node_id: str) -> dict[str, str]:  # noqa: ARG002  # the same for all
        return {}


def placement(nodes: dict[str, list[str]], draining: Iterable[str] = ()) -> Placement:
    """Deployments, with the nodes of their replicas, the oldest first; `draining`: nodes that drain."""
    moment = iter(range(1000))
    return Placement(
        applications={
            "app": Application(
                deployments={
                    name: Deployment(
                        replicas=tuple(
                            Placed(
                                replica_id=f"{name}{i}",
                                state="PENDING_MIGRATION" if node in draining else "RUNNING",
                                node_id=node,
                                start_time_s=next(moment),
                            )
                            for i, node in enumerate(places)
                        )
                    )
                    for name, places in nodes.items()
                }
            )
        },
        controller_info=Controller(node_id=HEAD),
    )


def choice_of_serve(nodes: dict[str, list[str]]) -> set[str]:
    """The Replica that Serve's scheduler would stop."""
    cluster: Any = NodeInfo()
    scheduler = DeploymentScheduler(cluster, HEAD, create_placement_group_fn=lambda *_: None)
    ids = {name: DeploymentID(name, "app") for name in nodes}
    for deployment_id in ids.values():
        scheduler.on_deployment_created(deployment_id, SpreadDeploymentSchedulingPolicy())
    for name, places in nodes.items():
        for i, node in enumerate(places):
            scheduler.on_replica_running(ReplicaID(f"{name}{i}", ids[name]), node)
    request = DeploymentDownscaleRequest(deployment_id=ids["Replica"], num_to_stop=1)
    return {
        replica.unique_id for replica in scheduler.schedule({}, {ids["Replica"]: request})[ids["Replica"]]
    }


places = st.lists(st.sampled_from(NODES), min_size=1, max_size=5)


@given(replicas=st.lists(st.sampled_from(NODES), min_size=2, max_size=8), routers=places, ledger=places)
def test_serve_chooses_as_predicted(replicas: list[str], routers: list[str], ledger: list[str]) -> None:
    nodes = dict(zip(DEPLOYMENTS, (ledger, replicas, routers), strict=True))
    assert next_to_go(placement(nodes), "app", "Replica") == choice_of_serve(nodes)


@pytest.mark.parametrize(
    ("replicas", "victim"),
    [(["a", "a", "a"], "Replica2"), (["a", "b", "a"], "Replica1"), (["b", "a", "c"], "Replica0")],
)
def test_a_replica_is_alone_the_newest_or_the_oldest(replicas: list[str], victim: str) -> None:
    assert next_to_go(placement({"Replica": replicas}), "app", "Replica") == {victim}


def test_a_node_with_a_router_keeps_its_replica() -> None:
    assert next_to_go(placement({"Replica": ["a", "b"], "Router": ["a"]}), "app", "Replica") == {"Replica1"}


def test_replicas_on_nodes_that_drain_go_besides() -> None:
    nodes = {"Replica": ["a", "b", "c"]}
    assert next_to_go(placement(nodes, draining="b"), "app", "Replica") == {"Replica1", "Replica0"}
    assert next_to_go(placement(nodes, draining="bc"), "app", "Replica") == {"Replica1", "Replica2"}
    assert next_to_go(placement(nodes, draining="abc"), "app", "Replica") == {
        "Replica0",
        "Replica1",
        "Replica2",
    }


def test_of_a_fixed_number_only_those_on_nodes_that_drain_go() -> None:
    nodes = {"Replica": ["a", "b", "c"]}
    assert next_to_go(placement(nodes), "app", "Replica", is_fixed=True) == frozenset()
    assert next_to_go(placement(nodes, draining="b"), "app", "Replica", is_fixed=True) == {"Replica1"}


def test_nobody_goes_where_there_is_no_choice() -> None:
    assert next_to_go(placement({"Replica": ["a"]}), "app", "Replica") == frozenset()
    assert next_to_go(placement({}), "app", "Replica") == frozenset()
    assert next_to_go(Placement(), "app", "Replica") == frozenset()
