"""`headway status`: what a running application does now, from its routers' GET /stats."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from router.histogram import ITL_EDGES_MS, WAIT_EDGES_MS, Histogram

ASKED_AT_ONCE: Final = 4
"""Requests per look: each goes to some router, and with a few of them all are met soon."""
FORGET_S: Final = 15.0
"""A router that has not answered for so long is gone, or was not met."""
REFRESH_S: Final = 1.0
TIMEOUT_S: Final = 5.0


class StatusError(Exception):
    """There is nothing to show; one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where it serves (default %(default)s)"
    )
    parser.add_argument("--key", help="API key, if it asks for one")
    parser.add_argument("--once", action="store_true", help="print once instead of refreshing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the status until Ctrl-C, or once; returns the exit code."""
    headers = {"connection": "close"} | ({"authorization": f"Bearer {options.key}"} if options.key else {})
    try:
        with httpx.Client(base_url=options.url, headers=headers, timeout=TIMEOUT_S) as http:
            watch = Watch(lambda: _ask(http), time.monotonic)
            if options.json:
                print(json.dumps(watch.look().as_json()))
            elif options.once or not sys.stdout.isatty():
                Console().print(drawn(watch.look()))
            else:
                _refresh(watch)
    except StatusError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _refresh(watch: "Watch") -> None:
    with Live(drawn(watch.look()), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(drawn(watch.look()), refresh=True)


def _ask(http: httpx.Client) -> dict[str, Any]:
    """Return the answer of some router. Raises StatusError."""
    try:
        answer = http.get("/stats")
        stats = answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise StatusError(f"{http.base_url} is no URL") from None
    except httpx.HTTPError as error:
        raise StatusError(f"{http.base_url} does not answer: {error or type(error).__name__}") from None
    except ValueError:
        raise StatusError(f"{http.base_url} does not answer as Headway does") from None
    if answer.status_code == 401:
        raise StatusError(f"{http.base_url} asks for a key: --key KEY")
    if answer.status_code != 200 or not isinstance(stats, dict) or "tiers" not in stats:
        raise StatusError(f"{http.base_url} does not answer as Headway does (status {answer.status_code})")
    return stats


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """One tier over all routers."""

    ttft: Histogram
    itl: Histogram
    ttft_target_ms: float | None
    itl_target_ms: float | None
    kept: int
    broken: int
    num_queued: int
    oldest_s: float
    open_gap_ms: float

    @property
    def attainment(self) -> float | None:
        """Share of the answers that kept the promise; None without answers."""
        return self.kept / (self.kept + self.broken) if self.kept + self.broken else None

    def as_json(self) -> dict[str, Any]:
        return {
            "ttft_ms_p50": self.ttft.quantile(0.5),
            "ttft_ms_p99": self.ttft.quantile(0.99),
            "ttft_target_ms": self.ttft_target_ms,
            "itl_ms_p50": self.itl.quantile(0.5),
            "itl_ms_p99": self.itl.quantile(0.99),
            "itl_target_ms": self.itl_target_ms,
            "open_gap_ms": self.open_gap_ms,
            "attainment": self.attainment,
            "answers": self.kept + self.broken,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What all routers together know."""

    num_routers: int
    replicas: dict[str, dict[str, Any]]
    tiers: dict[str, TierStatus]

    @property
    def kv(self) -> dict[str, Any]:
        """Blocks of all replicas."""
        blocks = sum(replica["num_blocks"] for replica in self.replicas.values())
        used = sum(replica["num_blocks"] - replica["free_blocks"] for replica in self.replicas.values())
        return {"used_blocks": used, "blocks": blocks, "used_fraction": used / blocks if blocks else 0.0}

    def as_json(self) -> dict[str, Any]:
        return {
            "routers": self.num_routers,
            "replicas": self.replicas,
            "tiers": {name: tier.as_json() for name, tier in self.tiers.items()},
            "queues": {
                name: {"num_requests": tier.num_queued, "oldest_s": tier.oldest_s}
                for name, tier in self.tiers.items()
            },
            "kv": self.kv,
        }


class Watch:
    """Looks again and again. The first look tells of all time, later ones of what came in between."""

    def __init__(self, ask: Callable[[], dict[str, Any]], clock: Callable[[], float]) -> None:
        """`ask` returns the stats of some router."""
        self._ask = ask
        self._clock = clock
        self._seen: dict[str, tuple[float, dict[str, Any]]] = {}

    def look(self) -> Status:
        """Ask some routers, and put together what is known of all. Raises what `ask` raises."""
        now = self._clock()
        before = {name: stats for name, (_, stats) in self._seen.items()}
        for _ in range(ASKED_AT_ONCE):
            stats = self._ask()
            self._seen[stats["router"]] = now, stats
        self._seen = {n: (at, stats) for n, (at, stats) in self._seen.items() if now - at <= FORGET_S}
        return _together({name: stats for name, (_, stats) in self._seen.items()}, before)


def _together(routers: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> Status:
    names = dict.fromkeys(name for stats in routers.values() for name in stats["tiers"])
    replicas = {name: load for stats in routers.values() for name, load in stats["replicas"].items()}
    tiers = {name: _tier(name, routers, before) for name in names}
    return Status(num_routers=len(routers), replicas=dict(sorted(replicas.items())), tiers=tiers)


def _tier(name: str, routers: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> TierStatus:
    ttft, itl = Histogram(WAIT_EDGES_MS), Histogram(ITL_EDGES_MS)
    kept = broken = num_queued = 0
    parts = [(router, stats["tiers"][name]) for router, stats in routers.items() if name in stats["tiers"]]
    for router, part in parts:
        earlier = before.get(router, {}).get("tiers", {}).get(name, {})
        for histogram, field in ((ttft, "ttft_counts"), (itl, "itl_counts")):
            old = earlier.get(field) or [0] * len(part[field])
            histogram.add([now - then for now, then in zip(part[field], old, strict=True)], 0.0)
        kept += part["kept"]
        broken += part["broken"]
        num_queued += part["num_queued"]
    return TierStatus(
        ttft=ttft,
        itl=itl,
        ttft_target_ms=parts[0][1]["ttft_target_ms"],
        itl_target_ms=parts[0][1]["itl_target_ms"],
        kept=kept,
        broken=broken,
        num_queued=num_queued,
        oldest_s=max(part["oldest_s"] for _, part in parts),
        open_gap_ms=max(part["open_gap_ms"] for _, part in parts),
    )


def drawn(status: Status) -> Group:
    """Return the two tables: tiers, then replicas."""
    return Group(_tiers_table(status), _replicas_table(status))


def _tiers_table(status: Status) -> Table:
    table = Table(title=f"Tiers, over {status.num_routers} router(s)", title_justify="left")
    for column in (
        "tier",
        "kept",
        "TTFT p50",
        "p99",
        "target",
        "ITL p50",
        "p99",
        "target",
        "queued",
        "oldest",
    ):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, tier in status.tiers.items():
        kept = tier.attainment
        table.add_row(
            name,
            "-" if kept is None else f"{kept:.1%}",
            _ms(tier.ttft.quantile(0.5)),
            _judged(tier.ttft.quantile(0.99), tier.ttft_target_ms),
            _ms(tier.ttft_target_ms),
            _ms(tier.itl.quantile(0.5)),
            _judged(tier.itl.quantile(0.99), tier.itl_target_ms),
            _ms(tier.itl_target_ms),
            str(tier.num_queued),
            f"{tier.oldest_s:.1f} s" if tier.num_queued else "-",
        )
    return table


def _replicas_table(status: Status) -> Table:
    kv = status.kv
    table = Table(title=f"Replicas: KV {kv['used_fraction']:.0%} in use", title_justify="left")
    for column in ("replica", "running", "waiting", "seats", "KV", "step", ""):
        table.add_column(column, justify="left" if column == "replica" else "right")
    for name, load in status.replicas.items():
        used = load["num_blocks"] - load["free_blocks"]
        table.add_row(
            name,
            str(load["num_running"]),
            str(load["num_waiting"]),
            str(load["max_num_seqs"]),
            f"{used / load['num_blocks']:.0%}" if load["num_blocks"] else "-",
            f"{load['step_ms']:.1f} ms",
            "[red]overloaded[/]" if load["overloaded"] else "",
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _judged(value: float | None, target: float | None) -> str:
    if value is None or target is None:
        return _ms(value)
    return f"[{'green' if value <= target else 'red'}]{_ms(value)}[/]"
