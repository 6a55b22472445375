"""What Serve says of the replicas and its autoscaling policy has decided, on its way to the live page.

The policy runs in Serve's controller, the page's router elsewhere. Decisions travel through Ray's key-value
store, which both reach: written only when they change, by a thread, because the controller must never wait.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Final

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve.exceptions import RayServeException

from cluster.autoscaling import Decision, Observation
from router.scaling import Scaling, ScalingNote

MAX_NOTES: Final = 20
READ_INTERVAL_S: Final = 2.0
NAMESPACE: Final = b"headway"


def _put(application: str, notes: bytes) -> None:
    _internal_kv_put(_key(application), notes, overwrite=True, namespace=NAMESPACE)


def _key(application: str) -> bytes:
    return f"autoscaling:{application}".encode()


class DecisionNotes:
    """The last decisions that differ from those before them. Callable from the controller's loop."""

    def __init__(
        self, put: Callable[[str, bytes], None] = _put, clock: Callable[[], float] = time.time
    ) -> None:
        self._put = put
        self._clock = clock
        self._notes: deque[ScalingNote] = deque(maxlen=MAX_NOTES)
        self._last: object = None

    def __call__(self, application: str, observation: Observation, decision: Decision) -> None:
        what = decision.target, {reason.code for reason in decision.reasons}
        if what == self._last:
            return
        self._last = what
        reasons = [reason.text for reason in decision.reasons]
        note = ScalingNote(
            at=self._clock(), target=decision.target, running=observation.running, reasons=reasons
        )
        self._notes.appendleft(note)
        encoded = msgspec.json.encode(list(self._notes))
        threading.Thread(target=self._put, args=(application, encoded), daemon=True).start()


class ServeScaling:
    """router.scaling.ScalingSource over Serve. For one event loop."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._latest = Scaling()
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    def __call__(self) -> Scaling:
        now = asyncio.get_running_loop().time()
        if self._reading is None and now - self._read_at >= READ_INTERVAL_S:
            self._read_at = now
            # An empty context: nothing of this belongs to the request that happens to ask.
            self._reading = asyncio.get_running_loop().create_task(self._refresh(), context=Context())
        return self._latest

    async def _refresh(self) -> None:
        try:
            self._latest = await asyncio.to_thread(self._read)
        except (RayError, RayServeException, TimeoutError):
            self._latest = Scaling()  # the controller is away: better nothing than what was
        finally:
            self._reading = None

    def _read(self) -> Scaling:
        status = serve.status().applications.get(self._application)
        deployment = None if status is None else status.deployments.get("Replica")
        states = {} if deployment is None else deployment.replica_states
        notes = _internal_kv_get(_key(self._application), namespace=NAMESPACE)
        return Scaling(
            states={str(getattr(state, "value", state)).lower(): count for state, count in states.items()},
            notes=[] if notes is None else msgspec.json.decode(notes, type=list[ScalingNote]),
        )
