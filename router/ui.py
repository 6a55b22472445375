"""Ui: the routes of the live page. Its files for everybody, its data and demo load for admins."""

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Final

from router import ui_files
from router.backend import ReplicaBackend
from router.board import Board
from router.callers import Caller, check_admin
from router.demo_load import DemoLoads
from router.http import Exchange
from router.limits import Limits
from router.measures import RouterMeasures
from router.scaling import Scaling, ScalingSource
from router.step_feed import StepFeed, StepSource
from router.tenants import Tier

Handler = Callable[[Exchange, Caller], Awaitable[None]]


class Ui:
    """What build_app adds to its routes."""

    def __init__(
        self,
        router_id: str,
        backend: ReplicaBackend,
        steps: StepSource,
        limits: Limits,
        measures: RouterMeasures,
        tiers: tuple[Tier, ...],
        scaling: ScalingSource = Scaling,
    ) -> None:
        """`tiers` with the targets that hold for them, wherever those were set."""
        board = Board(router_id, backend, limits, measures, tiers, scaling)
        self._feed = StepFeed(steps, board)
        self._loads = DemoLoads(backend, limits, measures, Random())
        self.routes: Final[Mapping[str, dict[str, Handler]]] = {
            **{path: {"GET": self._file} for path in ui_files.PATHS},
            "/ui/events": {"GET": self._events},
            "/ui/load": {"POST": self._load},
        }

    async def _file(self, exchange: Exchange, caller: Caller) -> None:  # noqa: ARG002 - a Handler
        await ui_files.serve_file(exchange)

    async def _events(self, exchange: Exchange, caller: Caller) -> None:
        check_admin(caller)
        await self._feed.serve(exchange)

    async def _load(self, exchange: Exchange, caller: Caller) -> None:
        check_admin(caller)
        await self._loads.serve(exchange, caller)
