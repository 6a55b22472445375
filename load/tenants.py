"""Who sends: tenants, their tiers, keys and shares, and what each tier was promised."""

import os
from pathlib import Path
from typing import Any

import msgspec
import yaml

from load.errors import LoadError
from load.files import read_file
from load.plan import Tenant


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A promise, in milliseconds. A request keeps it when it meets every target that is set."""

    ttft: float | None = None
    """From the first attempt to the first output, waits that a 429 asked for included."""
    itl: float | None = None
    """99th percentile of the request's own gaps."""
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        set_targets = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return ", ".join(f"{name} <= {ms:g} ms" for name, ms in set_targets if ms is not None) or "none"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant and how much it sends."""

    tenant: Tenant
    share: float = 1.0
    """Part of the run's arrivals, relative to the other tenants' shares."""
    rate: float | None = None
    """Requests per second of its own, besides the shared arrivals."""


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """Everyone in the run."""

    sources: tuple[Source, ...] = (Source(tenant=Tenant()),)
    slos: dict[str, Slo] = {}
    """Per tier; "" is for tiers without their own."""

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(source.tenant for source in self.sources)

    def slo(self, tier: str) -> Slo | None:
        """Return what the tier was promised, if anything."""
        return self.slos.get(tier, self.slos.get(""))


class _TenantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    tier: str = "default"
    api_key: str | None = None
    api_key_env: str | None = None
    share: float = 1.0
    rate: float | None = None
    weight: float = 1.0
    body: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenants: list[_TenantEntry]
    tiers: dict[str, Slo] = {}


def read_cast(path: Path) -> Cast:
    """Read a tenants file (docs/load.md). Raises LoadError that names the field."""
    data = read_file(path, "the tenants")
    try:
        file = msgspec.convert(yaml.safe_load(data), _File)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise LoadError(f"{path}: {' '.join(str(error).split())}") from error
    names = [entry.name for entry in file.tenants]
    if not names or len(set(names)) != len(names):
        raise LoadError(f"{path}: tenants need one entry at least, and different names")
    return Cast(sources=tuple(_source(entry, path) for entry in file.tenants), slos=file.tiers)


def _source(entry: _TenantEntry, path: Path) -> Source:
    where = f"{path}: tenant {entry.name!r}"
    if entry.share < 0 or entry.weight <= 0 or (entry.rate is not None and entry.rate <= 0):
        raise LoadError(f"{where}: share must be >= 0, weight and rate > 0")
    key = entry.api_key
    if entry.api_key_env is not None:
        key = os.environ.get(entry.api_key_env)
        if key is None:
            raise LoadError(f"{where}: the environment has no {entry.api_key_env}")
    tenant = Tenant(name=entry.name, tier=entry.tier, api_key=key, weight=entry.weight, body=entry.body)
    return Source(tenant=tenant, share=0.0 if entry.rate is not None else entry.share, rate=entry.rate)


def parse_slo(texts: list[str]) -> dict[str, Slo]:
    """Read `ttft=500,itl=50` and `TIER:ttft=500`, several of them. Raises LoadError."""
    slos: dict[str, Slo] = {}
    for text in texts:
        tier, _, targets = text.rpartition(":")
        try:
            pairs = dict(target.split("=") for target in targets.split(","))
            slo = msgspec.convert({name: float(ms) for name, ms in pairs.items()}, Slo)
        except (ValueError, msgspec.ValidationError):
            raise LoadError(f"{text!r} is not like [TIER:]ttft=500,itl=50,tpot=40,e2e=9000 (ms)") from None
        slos[tier] = slo
    return slos
