"""`headway bench limits`: what passes a tenant's limit when everybody asks at once, over several routers.

The routers' quota and the ledger run as in production, with encoded messages; only the carrier is a
delay of 1 to 5 ms, as Ray's calls have it, that loses one message in fifty.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass

from cluster.arguments import at_least_one
from cluster.bench.report import commit, percentile
from router.errors import ApiError
from router.ledger import SETTLE_S, Ledger, answer
from router.quota import Quota
from router.quota_client import LedgerGoneError, QuotaClient
from router.rate_limit import PERIOD_S
from router.tenants import Catalogue, Tenant

NAME = "limits"
HELP = "tokens that pass a limit when 1,000 requests ask at once over 3 routers"
LONGEST_TOKENS = 300
STREAM_S = 0.5
LOSS = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attempts", type=at_least_one, default=1000, help="requests (default 1000)")
    parser.add_argument("--routers", type=at_least_one, default=3, help="routers (default 3)")
    parser.add_argument("--tpm", type=at_least_one, default=50_000, help="tokens per minute (default 50000)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, delays and losses (default 0)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """How one request ended."""

    used_tokens: int
    """0 = refused."""
    reserve_ms: float


class _LedgerBehindWire:
    def __init__(self, ledger: Ledger, catalogue: Catalogue, draw: random.Random) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._draw = draw
        self.num_calls = 0

    async def call(self, message: bytes) -> bytes:
        self.num_calls += 1
        await asyncio.sleep(self._draw.uniform(0.0005, 0.0025))
        reply = answer(self._ledger, self._catalogue, message, time.monotonic())
        await asyncio.sleep(self._draw.uniform(0.0005, 0.0025))
        if self._draw.random() < LOSS:
            raise LedgerGoneError("lost")
        return reply


def run(args: argparse.Namespace) -> dict[str, object]:
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> dict[str, object]:
    draw = random.Random(args.seed)
    tenant = Tenant(name="bench", tier="standard", tpm=args.tpm)
    catalogue = Catalogue(version="1", tenants=(tenant,))
    ledger = Ledger(epoch=1, draw_session=lambda: draw.getrandbits(63))
    began_at = time.monotonic()
    ledger.replace_catalogue(catalogue, began_at)
    link = _LedgerBehindWire(ledger, catalogue, draw)
    clients = [
        QuotaClient(
            link,
            Quota(f"router {number}"),
            clock=time.monotonic,
            uniform=draw.uniform,
            catalogue_changed=lambda _: None,
        )
        for number in range(args.routers)
    ]
    exchanges = [asyncio.create_task(client.run()) for client in clients]
    await asyncio.sleep(SETTLE_S + 0.5)  # the ledger grants nothing before
    attempts = [_attempt(clients[i % args.routers], tenant, draw) for i in range(args.attempts)]
    ended = await asyncio.gather(*attempts)
    elapsed_s = time.monotonic() - began_at
    for exchange in exchanges:
        exchange.cancel()
    allowed = args.tpm * (1 + elapsed_s / PERIOD_S)
    passed = sum(attempt.used_tokens for attempt in ended)
    reserve_ms = [attempt.reserve_ms for attempt in ended]
    return {
        "tokens_allowed": int(allowed),
        "tokens_passed": passed,
        "overshoot_fraction": max(0.0, passed / allowed - 1),
        "attempts": args.attempts,
        "granted": sum(attempt.used_tokens > 0 for attempt in ended),
        "routers": args.routers,
        "reserve_ms_p50": percentile(reserve_ms, 50),
        "reserve_ms_p99": percentile(reserve_ms, 99),
        "ledger_calls": link.num_calls,
        "elapsed_s": elapsed_s,
        "commit": commit(),
    }


async def _attempt(client: QuotaClient, tenant: Tenant, draw: random.Random) -> _Attempt:
    """Reserve, answer for a while, and use all of it, as the worst customer would."""
    tokens = draw.randint(20, LONGEST_TOKENS)
    asked_at = time.perf_counter()
    try:
        reservation = await client.reserve(tenant, tokens)
    except ApiError:
        return _Attempt(used_tokens=0, reserve_ms=(time.perf_counter() - asked_at) * 1000)
    reserve_ms = (time.perf_counter() - asked_at) * 1000
    await asyncio.sleep(draw.uniform(0.0, STREAM_S))
    reservation.settle(tokens)
    return _Attempt(used_tokens=tokens, reserve_ms=reserve_ms)
