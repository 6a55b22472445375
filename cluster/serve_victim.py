"""Which replicas Serve would stop next: its rule, on what it tells of itself. Routers give them little."""

import asyncio
from contextvars import Context
from typing import Final

import msgspec
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

INTERVAL_S: Final = 10.0
"""Between two questions. Every router asks, and the controller lists all replicas each time."""
TIMEOUT_S: Final = 10.0


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of any deployment, as Serve tells it."""

    replica_id: str
    state: str
    node_id: str | None = None
    """None until it has a place."""
    start_time_s: float = 0.0


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One of an application's deployments."""

    replicas: tuple[Placed, ...] = ()

    def placed(self) -> list[Placed]:
        """Those that run, the oldest first."""
        running = (replica for replica in self.replicas if replica.state in ("RUNNING", "PENDING_MIGRATION"))
        return sorted(running, key=lambda replica: replica.start_time_s)


class Application(msgspec.Struct, frozen=True, kw_only=True):
    """One application."""

    deployments: dict[str, Deployment] = {}


class Controller(msgspec.Struct, frozen=True, kw_only=True):
    """Serve's controller, which is always on the head."""

    node_id: str | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """What Serve tells of itself, as far as its choice depends on it."""

    applications: dict[str, Application] = {}
    controller_info: Controller = Controller()


def next_to_go(
    placement: Placement, application: str, deployment: str, *, is_fixed: bool = False
) -> frozenset[str]:
    """Predict which replicas of a deployment Serve stops next.

    Those on nodes that drain go as soon as others have taken their place. Besides, if there had to be one
    fewer: off the head, on the node with the fewest replicas of all deployments, the newest there. Of equal
    nodes Serve takes the one that comes first in its books, by deployment, then by age: with a replica on
    each node that is the oldest (ray.serve, deployment_scheduler.py, _get_replicas_to_stop). Not where their
    number `is_fixed`: to steer away from one would only crowd the others.
    """
    app = placement.applications.get(application, Application())
    ours = app.deployments.get(deployment, Deployment()).placed()
    draining = {replica.replica_id for replica in ours if replica.state == "PENDING_MIGRATION"}
    running = {replica.node_id: replica.replica_id for replica in ours if replica.state == "RUNNING"}
    if is_fixed or len(ours) - len(draining) < 2:
        return frozenset(draining)
    counts = _num_on_nodes(placement)
    head = placement.controller_info.node_id
    node = min((node for node in counts if node in running), key=lambda node: (node == head, counts[node]))
    return frozenset(draining | {running[node]})


def _num_on_nodes(placement: Placement) -> dict[str | None, int]:
    """Replicas of all deployments by node, in the order of Serve's books."""
    deployments = [
        deployment.placed()
        for application in placement.applications.values()
        for deployment in application.deployments.values()
    ]
    counts: dict[str | None, int] = {}
    for replicas in sorted(filter(None, deployments), key=lambda replicas: replicas[0].start_time_s):
        for replica in replicas:
            counts[replica.node_id] = counts.get(replica.node_id, 0) + 1
    return counts


class ServeVictim:
    """Asks Serve's controller again and again. For one event loop."""

    def __init__(self, application: str, deployment: str, *, is_fixed: bool) -> None:
        """`is_fixed`: nothing changes the number of replicas."""
        self._names = application, deployment
        self._is_fixed = is_fixed
        self.names: frozenset[str] = frozenset()
        """Replicas that go next, as of the last answer; none when the controller is away."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask, on the running loop and for as long as the process lives."""
        # An empty context: nothing of this belongs to a request.
        self._task = asyncio.get_running_loop().create_task(self._run(), context=Context())

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    details = await _get_global_client()._controller.get_serve_instance_details.remote()
                placement = msgspec.convert(details, Placement)
                self.names = next_to_go(placement, *self._names, is_fixed=self._is_fixed)
            except (RayError, RayServeException, TimeoutError, msgspec.ValidationError):
                self.names = frozenset()
            await asyncio.sleep(INTERVAL_S)
