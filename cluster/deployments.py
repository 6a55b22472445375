"""The Serve deployments, and the carrier of messages between them."""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

import grpc
import msgspec
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cluster import itl_targets
from cluster.access import read_pepper
from cluster.autoscaling_stats import replica_stats, router_stats
from cluster.config import AccessConfig, AutoscalingConfig
from cluster.ledger import LedgerShell
from cluster.loading import ProgressFile
from cluster.metrics.engine import EngineFigures
from cluster.metrics.exporter import export_in_background
from cluster.metrics.router import RouterFigures
from cluster.parts import Gate, OpenPump, open_access_log, open_app
from cluster.serve_scaling import ServeScaling
from cluster.serve_victim import ServeVictim
from replicas.api import FrameBatch
from replicas.config import EngineConfig
from replicas.progress import PhaseTimer
from router.app import App
from router.backend import ReplicaBackend
from router.callers import KeyedCallers, everybody
from router.counters import RouterCounters
from router.measures import RouterMeasures
from router.pinned_router import PinnedRouter
from router.quota import Quota
from router.quota_client import LedgerGoneError, QuotaClient
from router.replica_set import ReplicaSet, replica_set
from router.tenants import Tier
from router.tracing import Untraced
from router.transport import FrameStream, ReplicaGoneError
from router.transport_times import TransportTimes
from router.ui import Ui

_serve_log: Final = logging.getLogger("ray.serve")
if TYPE_CHECKING:
    from cluster.tracing import OtelTracing

REPLICA: Final = "Replica"
"""Name of the deployment of engines."""
UNBOUNDED_REQUESTS = 1_000_000
"""Serve's own queue is first in, first out: no request may ever wait there. Our admission refuses."""

_decode_counters = msgspec.msgpack.Decoder(RouterCounters).decode


class ServeTransport:
    """router.transport.Transport over a deployment handle. For one event loop.

    Calls go by gRPC instead of Ray's object store (`_by_reference=False`), from a router on the caller's
    own loop: a third of the CPU time, and a replica notices within milliseconds that its caller died.
    All methods must run in a context without a Serve request: calls made inside one share its id, and
    two at once collide in Ray.
    """

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        replicas._init(_run_router_in_separate_loop=False)
        serialization = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._calls = replicas.options(_by_reference=False, **serialization)
        self._streams = self._calls.options(stream=True)
        self._replicas = replica_set()
        self.times = TransportTimes()

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        self._replicas.watch(changed)

    async def card(self, replica: str) -> bytes:
        return await self._call(self._calls.card, replica)

    async def send(self, replica: str, batch: bytes) -> bytes:
        return await self._call(self._calls.submit, replica, batch)

    async def steps(self, replica: str, watch: bytes) -> bytes:
        return await self._call(self._calls.steps, replica, watch)

    async def wake(self) -> None:
        response = self._calls.wake.remote()
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayActorError, RayServeException, grpc.RpcError) as error:
            raise ReplicaGoneError(_first_line(error)) from error

    def subscribe(self, replica: str, subscribe: bytes) -> FrameStream:
        if not self._replicas.reachable(replica):
            return _GoneStream(replica)
        self._replicas.hold(replica)
        response = self._streams.frames.remote(subscribe, replica=replica)
        return _ServeStream(replica, response, self._replicas, self.times)

    async def _call(self, method: Any, replica: str, *arguments: bytes) -> bytes:
        if not self._replicas.reachable(replica):
            raise ReplicaGoneError(replica)
        response = method.remote(*arguments, replica=replica)
        try:
            reply: bytes = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayActorError, RayServeException, grpc.RpcError) as error:
            raise ReplicaGoneError(f"{replica}: {_first_line(error)}") from error
        return reply


class _ServeStream:
    """An open subscription. Holds its replica, so that a draining one stays reachable until it ends."""

    def __init__(
        self,
        replica: str,
        response: DeploymentResponseGenerator[Any],
        replicas: ReplicaSet,
        times: TransportTimes,
    ) -> None:
        self._replica = replica
        self._times = times
        self._response = response
        self._replicas: ReplicaSet | None = replicas

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for batch in self._response:
                self._times.observe(batch, time.time())
                for frame in batch.frames:
                    yield frame
        except RequestCancelledError:
            return
        except (RayActorError, RayServeException, grpc.RpcError) as error:
            raise ReplicaGoneError(f"{self._replica}: {_first_line(error)}") from error
        finally:
            self._release()

    def cancel(self) -> None:
        self._response.cancel()
        self._release()

    def _release(self) -> None:
        if self._replicas is not None:
            self._replicas.release(self._replica)
            self._replicas = None


class _GoneStream:
    """A subscription to a replica that cannot be reached."""

    def __init__(self, replica: str) -> None:
        self._replica = replica

    def __aiter__(self) -> AsyncIterator[bytes]:
        raise ReplicaGoneError(self._replica)

    def cancel(self) -> None:
        """Nothing is open."""


class Replica:
    """One engine. Every method names the replica it is meant for and refuses to be another."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: EngineConfig,
        tiers: tuple[Tier, ...],
        open_pump: OpenPump,
        progress_folder: str | None,
        trace_to: str | None,
    ) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        progress = ProgressFile.open(progress_folder, self._name)
        timer = PhaseTimer(progress.note, "importing", time.monotonic)
        try:
            # Off the loop: loading takes long, and Serve watches that the loop answers.
            opened = await asyncio.to_thread(open_pump, config, timer)
        except Exception as error:
            progress.fail(error)
            raise
        self._pump = opened.pump
        names = {tier.level: tier.name for tier in tiers}
        figures = EngineFigures(self._pump, names, opened.device, time.monotonic)
        if trace_to is not None:
            self._pump.trace_to(_tracing(trace_to, "headway-replica").engine)
        self._pump.start()
        self._export = export_in_background(figures.samples, _common_labels())
        phases = timer.finish()
        self._cold_start_s = sum(phases.values())
        progress.finish(self._pump.card, opened.facts, phases)
        rounded = {doing: round(seconds, 2) for doing, seconds in phases.items()}
        _serve_log.info("%s", json.dumps({"event": "started", "replica": self._name, "phases_s": rounded}))

    async def card(self, *, replica: str) -> bytes:
        """Return the encoded ModelCard."""
        self._check_name(replica)
        return msgspec.msgpack.encode(self._pump.card)

    async def submit(self, batch: bytes, *, replica: str) -> bytes:
        """Take an encoded CommandBatch, return the encoded BatchReply."""
        self._check_name(replica)
        return self._pump.apply(batch)

    async def steps(self, watch: bytes, *, replica: str) -> bytes:
        """Take an encoded StepWatch, return the encoded StepReport."""
        self._check_name(replica)
        return self._pump.steps(watch)

    async def frames(self, subscribe: bytes, *, replica: str) -> AsyncIterator[FrameBatch]:
        """Yield the frames of a step stream."""
        self._check_name(replica)
        async with contextlib.aclosing(self._pump.stream(subscribe)) as batches:
            async for batch in batches:
                yield batch

    async def wake(self) -> None:
        """Answer: while nobody does, Serve counts the call, and starts a replica where there is none."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler is told of this replica and its routers. Serve calls it every second."""
        pump = self._pump
        load = msgspec.structs.replace(pump.load, overloaded=pump.was_at_floor)  # not of one step alone
        able = pump.engine.capability(load)
        stats = replica_stats(load, able, pump.card.block_size, self._cold_start_s)
        for counters in self._pump.counters():
            stats |= router_stats(_decode_counters(counters))
        return stats

    def check_health(self) -> None:
        """Raise when this process should be replaced. Serve calls it every other second."""
        reason = self._pump.failure()
        if reason is not None:
            raise RuntimeError(reason)

    def __del__(self) -> None:
        """End the engine's thread. Serve calls this after the drain."""
        if hasattr(self, "_pump"):  # loading may have failed
            self._pump.stop()

    def _check_name(self, replica: str) -> None:
        if replica != self._name:
            raise ReplicaGoneError(f"{replica}: answered by {self._name}")


class ServeLedgerLink:
    """router.quota_client.LedgerLink over a deployment handle; the rules of ServeTransport hold."""

    def __init__(self, ledger: DeploymentHandle[Any]) -> None:
        ledger._init(_run_router_in_separate_loop=False)
        serialization = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._calls = ledger.options(_by_reference=False, **serialization)

    async def call(self, message: bytes) -> bytes:
        response = self._calls.answer.remote(message)
        try:
            reply: bytes = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayActorError, RayServeException, grpc.RpcError) as error:
            raise LedgerGoneError(_first_line(error)) from error
        return reply


class Router:
    """The HTTP side: one ASGI application over all replicas. Healthy without replicas, but not ready."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        replicas: DeploymentHandle[Any],
        ledger: DeploymentHandle[Any],
        config: EngineConfig,
        access: AccessConfig,
        tiers: tuple[Tier, ...],
        scaling: AutoscalingConfig | None,
        trace_to: str | None,
    ) -> None:
        transport = ServeTransport(replicas)
        self._victim = ServeVictim(serve.get_replica_context().app_name, REPLICA, is_fixed=scaling is None)
        settled = itl_targets.settled(tiers, config)
        measures = RouterMeasures(settled)
        self._backend = ReplicaBackend(
            transport,
            router_id=serve.get_replica_context().replica_id.unique_id,
            first_epoch=time.time_ns(),
            draw=random.Random(),
            tiers=tiers,
            measures=measures,
            wake=transport.wake if scaling is not None and scaling.min_replicas == 0 else None,
            next_to_go=lambda: self._victim.names,
        )
        keyed = None if access.keys_file is None else KeyedCallers(tiers, read_pepper(access), time.time)
        quota = QuotaClient(
            ServeLedgerLink(ledger),
            Quota(serve.get_replica_context().replica_id.unique_id),
            clock=time.monotonic,
            uniform=random.uniform,
            catalogue_changed=keyed.replace if keyed else lambda _: None,
            service=self._backend.service,
        )
        gate = Gate(
            identify=keyed or everybody(tiers),
            limits=quota,
            access=open_access_log(access.log),
            tracing=Untraced() if trace_to is None else _tracing(trace_to, "headway-router"),
        )
        figures = RouterFigures(
            name=serve.get_replica_context().replica_id.unique_id,
            measures=measures,
            backend=self._backend,
            times=transport.times,
            quota=quota,
            access=gate.access,
        )
        ui = Ui(
            serve.get_replica_context().replica_id.unique_id,
            self._backend,
            transport,
            quota,
            measures,
            settled,
            ServeScaling(serve.get_replica_context().app_name),
        )
        self._app = await asyncio.to_thread(open_app, figures, config, gate, ui)
        self._backend.start()
        self._victim.start()
        self._exchange = asyncio.get_running_loop().create_task(quota.run(), context=Context())
        self._export = export_in_background(figures.samples, _common_labels())

    def check_health(self) -> None:
        """Raise when this process should be replaced. Replicas or a ledger that are missing are no reason."""
        if self._exchange.done():
            raise RuntimeError(f"quota is no longer exchanged: {self._exchange.exception()}")

    def __serve_build_asgi_app__(self) -> App:
        return self._app


class LedgerWithMetrics(LedgerShell):
    """The ledger's process as Serve runs it."""

    def __init__(self, access: AccessConfig, tiers: tuple[Tier, ...]) -> None:
        super().__init__(access, tiers)
        self._export = export_in_background(self.samples, _common_labels())


# Not decorators: the classes stay importable by their names, so that Ray pickles them by reference.
replica_deployment: Any = serve.deployment(
    name=REPLICA,
    max_ongoing_requests=UNBOUNDED_REQUESTS,
    health_check_period_s=2.0,
    health_check_timeout_s=10.0,
    graceful_shutdown_wait_loop_s=1.0,
    request_router_config=RequestRouterConfig(request_router_class=PinnedRouter),
)(Replica)
ledger_deployment: Any = serve.deployment(
    name="Ledger",
    num_replicas=1,
    max_ongoing_requests=UNBOUNDED_REQUESTS,
    health_check_period_s=2.0,
    health_check_timeout_s=5.0,
    graceful_shutdown_timeout_s=1.0,
    graceful_shutdown_wait_loop_s=0.1,
    ray_actor_options={"num_cpus": 0},
)(LedgerWithMetrics)
router_deployment: Any = serve.deployment(
    name="Router", max_ongoing_requests=UNBOUNDED_REQUESTS, max_surge_percent=100
)(serve.ingress()(Router))


def _common_labels() -> dict[str, str]:
    context = serve.get_replica_context()
    name = context.replica_id.unique_id
    return {"application": context.app_name, "deployment": context.deployment, "replica": name}


def _tracing(endpoint: str, service: str) -> "OtelTracing":
    from cluster.tracing import open_tracing  # OpenTelemetry: not where nobody traces

    return open_tracing(endpoint, service)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
