"""The files behind tenants and keys: reading them, and when they have changed."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from cluster.config import AccessConfig, ClusterConfig, read_yaml
from replicas.errors import ConfigError
from router.keys import MIN_PEPPER_BYTES, pepper_check
from router.tenants import Catalogue, KeyRecord, Tenant, TenantError, Tier, check_tenants, local_tenant

PEPPER_VARIABLE: Final = "HEADWAY_KEY_PEPPER"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class TenantsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The YAML file of the tenants."""

    tenants: tuple[Tenant, ...] = ()


class KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON file of the keys, written by `headway keys`."""

    pepper_check: str
    keys: tuple[KeyRecord, ...] = ()


def read_pepper(access: AccessConfig) -> bytes:
    """Return the secret of the keyed hash: the environment's, else the file's. Raises ConfigError."""
    text = os.environ.get(PEPPER_VARIABLE, "")
    source = PEPPER_VARIABLE
    if not text:
        if access.pepper_file is None:
            raise ConfigError(f"keys need a pepper: set access.pepper_file or {PEPPER_VARIABLE}")
        source = access.pepper_file
        try:
            text = Path(source).read_text(encoding="ascii")
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{source}: a pepper is ASCII text") from None
    pepper = text.strip().encode()
    if len(pepper) < MIN_PEPPER_BYTES:
        raise ConfigError(f"{source}: a pepper has at least {MIN_PEPPER_BYTES} characters")
    return pepper


def read_keys(path: Path) -> KeysFile:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeysFile)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_tenants(path: Path, tiers: tuple[Tier, ...]) -> tuple[Tenant, ...]:
    """Raises ConfigError."""
    try:
        tenants = msgspec.convert(read_yaml(path) or {}, TenantsFile).tenants
        check_tenants(tenants, tiers)
    except (msgspec.ValidationError, TenantError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return tenants


def read_catalogue(access: AccessConfig, tiers: tuple[Tier, ...]) -> Catalogue:
    """Return who may ask, as the files say now. Raises ConfigError."""
    if access.keys_file is None or access.tenants_file is None:
        return Catalogue(version="local", tenants=(local_tenant(tiers),))
    tenants = read_tenants(Path(access.tenants_file), tiers)
    keys = read_keys(Path(access.keys_file)).keys
    version = sha256(msgspec.msgpack.encode((tenants, keys))).hexdigest()[:16]
    return Catalogue(version=version, tenants=tenants, keys=keys)


def signature(access: AccessConfig) -> tuple[object, ...]:
    """A value that differs once a file has been written or replaced."""
    found: list[object] = []
    for name in (access.tenants_file, access.keys_file):
        try:
            status = os.stat(name) if name is not None else None
        except OSError:
            status = None
        found.append(status and (status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def check_access(config: ClusterConfig) -> None:
    """Find what is wrong with tenants and keys before anything starts. Raises ConfigError."""
    access = config.access
    if access.keys_file is None:
        if config.http.host not in LOOPBACK and not access.allow_anonymous:
            raise ConfigError(
                f"no keys are configured: everybody who reaches {config.http.host} would be served; "
                "configure access.keys_file, or pass --allow-anonymous"
            )
        return
    if access.tenants_file is None:
        raise ConfigError("access.keys_file needs access.tenants_file: the tenants that the keys belong to")
    read_tenants(Path(access.tenants_file), config.tiers)
    if read_keys(Path(access.keys_file)).pepper_check != pepper_check(read_pepper(access)):
        raise ConfigError(f"{access.keys_file}: its keys were made with another pepper")


def warning(config: ClusterConfig) -> str | None:
    """What must be said loudly when serving begins."""
    if config.access.keys_file is not None:
        return None
    return (
        "headway: WARNING: no keys are configured: everybody who reaches "
        f"{config.http.host}:{config.http.port} is served, as one tenant without limits"
    )
