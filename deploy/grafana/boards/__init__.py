"""The dashboards, one file each."""

from typing import Final

from deploy.grafana.boards.autoscaling import AUTOSCALING
from deploy.grafana.boards.cost import COST
from deploy.grafana.boards.engine import ENGINE
from deploy.grafana.boards.overview import OVERVIEW
from deploy.grafana.boards.router import ROUTER

BOARDS: Final = (OVERVIEW, ENGINE, ROUTER, AUTOSCALING, COST)
