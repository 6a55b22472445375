"""LedgerShell: the ledger's process, without Ray: its clock, its messages, the files that it watches."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextvars import Context
from typing import Final

from cluster.access import read_catalogue, signature
from cluster.config import AccessConfig
from cluster.metrics.catalogue import Sample
from cluster.metrics.ledger import ledger_samples
from replicas.errors import ConfigError
from router.ledger import Ledger, answer
from router.tenants import Tier

WATCH_S: Final = 1.0
"""How soon a changed file of tenants or keys is noticed."""
_log: Final = logging.getLogger(__name__)


class LedgerShell:
    """The one Ledger of a cluster, and the files of tenants and keys that it watches."""

    def __init__(self, access: AccessConfig, tiers: tuple[Tier, ...]) -> None:
        self._access = access
        self._tiers = tiers
        self._ledger = Ledger(epoch=time.time_ns(), draw_session=lambda: secrets.randbits(63))
        self._signature = signature(access)
        self._catalogue = read_catalogue(access, tiers)
        self._ledger.replace_catalogue(self._catalogue, time.monotonic())
        self._watch = asyncio.get_running_loop().create_task(self._watch_files(), context=Context())

    async def answer(self, message: bytes) -> bytes:
        """Take an encoded Request of router/quota_messages.py, return the encoded answer."""
        return answer(self._ledger, self._catalogue, message, time.monotonic())

    def samples(self) -> Iterator[Sample]:
        """Read the figures for Prometheus."""
        return ledger_samples(self._ledger, time.monotonic())

    def check_health(self) -> None:
        """Raise when this process should be replaced."""
        if self._watch.done():
            raise RuntimeError(f"the files are no longer watched: {self._watch.exception()}")

    async def _watch_files(self) -> None:
        """Follow the files; one that is wrong changes nothing but the log."""
        while True:
            await asyncio.sleep(WATCH_S)
            found = await asyncio.to_thread(signature, self._access)
            if found == self._signature:
                continue
            self._signature = found
            try:
                self._catalogue = await asyncio.to_thread(read_catalogue, self._access, self._tiers)
            except ConfigError as error:
                _log.error("tenants and keys stay as they were: %s", error)
                continue
            self._ledger.replace_catalogue(self._catalogue, time.monotonic())
            _log.warning("tenants and keys are now of version %s", self._catalogue.version)
