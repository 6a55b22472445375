"""KeyStore: the file of the keys, and the log of all changes to it; and `headway keys`."""

import argparse
import contextlib
import fcntl
import getpass
import json
import os
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from cluster.access import KeysFile, read_keys, read_pepper, read_tenants
from cluster.config import ClusterConfig, load_config
from replicas.errors import ConfigError
from router.keys import format_key, hash_key, pepper_check
from router.tenants import KeyRecord

PRIVATE: Final = 0o600


class KeyStore:
    """Creates and ends keys. Each change is atomic, locked against others, and logged beside the file."""

    def __init__(self, path: Path, pepper: bytes) -> None:
        self._path = path
        self._pepper = pepper

    def records(self) -> tuple[KeyRecord, ...]:
        """All keys, oldest first. Raises ConfigError for a file that was made with another pepper."""
        check = pepper_check(self._pepper)
        if not self._path.exists():
            return ()
        found = read_keys(self._path)
        if found.pepper_check != check:
            raise ConfigError(f"{self._path}: its keys were made with another pepper")
        return found.keys

    def create(self, tenant: str) -> str:
        """Return a new key; nothing but the caller will ever know it."""
        with self._locked():
            key, record = self._new(tenant)
            self._write((*self.records(), record))
            self._log("create", record)
        return key

    def revoke(self, key_id: str) -> None:
        """End a key for good. Raises ConfigError for an unknown id."""
        with self._locked():
            record = self._find(key_id)
            self._write(tuple(r for r in self.records() if r.id != key_id))
            self._log("revoke", record)

    def rotate(self, key_id: str, overlap_s: float) -> str:
        """Return a new key of the same tenant; the old one ends in `overlap_s` seconds."""
        with self._locked():
            old = self._find(key_id)
            key, record = self._new(old.tenant)
            ends_at = min(time.time() + overlap_s, old.expires_at or float("inf"))
            ending = msgspec.structs.replace(old, expires_at=ends_at)
            kept = tuple(ending if r.id == key_id else r for r in self.records())
            self._write((*kept, record))
            self._log("rotate", old, new=record.id, overlap_s=overlap_s)
        return key

    def _new(self, tenant: str) -> tuple[str, KeyRecord]:
        key_id = secrets.token_hex(6)
        key = format_key(key_id, secrets.token_urlsafe(32))
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        hashed = hash_key(key, self._pepper)
        return key, KeyRecord(id=key_id, tenant=tenant, hash=hashed, created_at=created_at)

    def _find(self, key_id: str) -> KeyRecord:
        for record in self.records():
            if record.id == key_id:
                return record
        raise ConfigError(f"{self._path}: there is no key {key_id[:12]}")

    def _write(self, records: tuple[KeyRecord, ...]) -> None:
        draft = self._path.with_name(self._path.name + ".draft")
        content = msgspec.json.format(
            msgspec.json.encode(KeysFile(pepper_check=pepper_check(self._pepper), keys=records))
        )
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._path)  # a reader never sees half a file

    @property
    def _audit_path(self) -> Path:
        return self._path.with_name(self._path.name + ".audit.jsonl")

    def _log(self, action: str, record: KeyRecord, **more: object) -> None:
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "by": getpass.getuser(),
            "action": action,
            "key_id": record.id,
            "tenant": record.tenant,
        }
        descriptor = os.open(self._audit_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(line | more) + "\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other writers. The audit log is locked: unlike the key file it is never replaced."""
        try:
            descriptor = os.open(self._audit_path, os.O_RDWR | os.O_CREAT, PRIVATE)
        except OSError as error:
            raise ConfigError(f"{self._audit_path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the key commands; each sets `keys`, a function from arguments to lines for stdout."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="make a key and show it, once")
    create.add_argument("tenant", help="whose requests it will carry")
    create.set_defaults(keys=_create)
    show = commands.add_parser("list", help="show all keys, without their secrets")
    show.set_defaults(keys=_list)
    revoke = commands.add_parser("revoke", help="end a key")
    revoke.add_argument("key_id", metavar="ID")
    revoke.set_defaults(keys=_revoke)
    rotate = commands.add_parser("rotate", help="make a key in place of another")
    rotate.add_argument("key_id", metavar="ID")
    rotate.add_argument(
        "--overlap",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="seconds until the old key ends (default 0)",
    )
    rotate.set_defaults(keys=_rotate)
    for command in (create, show, revoke, rotate):
        command.add_argument(
            "--config", type=Path, required=True, metavar="FILE", help="the cluster's YAML file"
        )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def _create(options: argparse.Namespace) -> list[str]:
    config = load_config(options.config)
    _check_tenant(config, options.tenant)
    return [_store(config, make_pepper=True).create(options.tenant)]


def _list(options: argparse.Namespace) -> list[str]:
    records = _store(load_config(options.config)).records()
    ends = {r.id: "" if r.expires_at is None else f"  until {_iso(r.expires_at)}" for r in records}
    return [f"{r.id}  {r.tenant}  {r.created_at}{ends[r.id]}" for r in records]


def _revoke(options: argparse.Namespace) -> list[str]:
    _store(load_config(options.config)).revoke(options.key_id)
    return [f"{options.key_id} is revoked"]


def _rotate(options: argparse.Namespace) -> list[str]:
    return [_store(load_config(options.config)).rotate(options.key_id, options.overlap)]


def _check_tenant(config: ClusterConfig, name: str) -> None:
    if config.access.tenants_file is None:
        raise ConfigError("access.tenants_file: needed for keys")
    known = {tenant.name for tenant in read_tenants(Path(config.access.tenants_file), config.tiers)}
    if name not in known:
        raise ConfigError(f"{config.access.tenants_file}: there is no such tenant")


def _store(config: ClusterConfig, *, make_pepper: bool = False) -> KeyStore:
    access = config.access
    if access.keys_file is None:
        raise ConfigError("access.keys_file: needed for keys")
    pepper_file = None if access.pepper_file is None else Path(access.pepper_file)
    if make_pepper and pepper_file is not None and not Path(access.keys_file).exists():
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(pepper_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
    return KeyStore(Path(access.keys_file), read_pepper(access))


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
