"""The key store, its audit log, the files of access, and `headway keys`."""

import json
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from cluster.access import check_access, read_catalogue, read_pepper, signature, warning
from cluster.cli import main
from cluster.config import AccessConfig, ClusterConfig, HttpConfig, load_config
from cluster.keys import KeyStore
from replicas.errors import ConfigError
from router.callers import KeyedCallers
from router.errors import ApiError
from router.tenants import DEFAULT_TIERS

PEPPER = b"a pepper of the tests"
YAML = "access: {tenants_file: tenants.yaml, keys_file: keys.json, pepper_file: pepper}\n"
TENANTS = "tenants: [{name: acme, tier: standard, rpm: 5}]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HEADWAY_KEY_PEPPER", raising=False)
    (tmp_path / "headway.yaml").write_text(YAML)
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    return tmp_path


def keys(folder: Path, *arguments: str) -> int:
    return main(["keys", *arguments, "--config", str(folder / "headway.yaml")])


def lets_in(folder: Path, key: str, now: float = 0.0) -> bool:
    access = load_config(folder / "headway.yaml").access
    callers = KeyedCallers(DEFAULT_TIERS, read_pepper(access), lambda: now)
    callers.replace(read_catalogue(access, DEFAULT_TIERS))
    try:
        return callers({b"authorization": b"Bearer " + key.encode()}).tenant.name == "acme"
    except ApiError:
        return False


def test_a_key_is_shown_once_and_lets_its_tenant_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(folder, "create", "acme") == 0
    key = capsys.readouterr().out.strip()
    assert lets_in(folder, key)
    assert keys(folder, "list") == 0
    listed = capsys.readouterr().out
    assert key.split("_")[1] in listed
    secret = key.split("_", 2)[2]
    stored = "".join(path.read_text() for path in folder.iterdir())
    assert secret not in listed + stored


def test_a_revoked_key_lets_nobody_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(folder, "create", "acme")
    key = capsys.readouterr().out.strip()
    assert keys(folder, "revoke", key.split("_")[1]) == 0
    assert not lets_in(folder, key)


def test_a_rotated_key_ends_after_the_overlap(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(folder, "create", "acme")
    old = capsys.readouterr().out.strip()
    assert keys(folder, "rotate", old.split("_")[1], "--overlap", "3600") == 0
    new = capsys.readouterr().out.strip()
    assert lets_in(folder, old)
    assert not lets_in(folder, old, now=1e11)
    assert lets_in(folder, new, now=1e11)


def test_every_change_is_in_the_audit_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(folder, "create", "acme")
    first = capsys.readouterr().out.strip().split("_")[1]
    keys(folder, "rotate", first)
    second = capsys.readouterr().out.strip().split("_")[1]
    keys(folder, "revoke", second)
    lines = [json.loads(line) for line in (folder / "keys.json.audit.jsonl").read_text().splitlines()]
    assert [(line["action"], line["key_id"], line["tenant"]) for line in lines] == [
        ("create", first, "acme"),
        ("rotate", first, "acme"),
        ("revoke", second, "acme"),
    ]
    assert lines[1]["new"] == second
    assert all(line["by"] and line["at"] for line in lines)


def test_secrets_are_for_their_owner_only(folder: Path) -> None:
    keys(folder, "create", "acme")
    for name in ("keys.json", "pepper", "keys.json.audit.jsonl"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_keys_made_at_once_are_all_kept(folder: Path) -> None:
    store = KeyStore(folder / "keys.json", PEPPER)
    threads = [threading.Thread(target=store.create, args=("acme",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({record.id for record in store.records()}) == 16


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("create", "nobody"), "there is no such tenant"),
        (("revoke", "000000000000"), "keys need a pepper"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    (folder / "headway.yaml").write_text(YAML.replace(", pepper_file: pepper", ""))
    assert keys(folder, *arguments) == 2
    complaint = capsys.readouterr().err
    assert reason in complaint
    assert complaint.count("\n") == 1


def test_another_pepper_is_noticed(folder: Path) -> None:
    KeyStore(folder / "keys.json", PEPPER).create("acme")
    with pytest.raises(ConfigError, match="made with another pepper"):
        KeyStore(folder / "keys.json", b"another pepper, not it").create("acme")
    (folder / "pepper").write_text("another pepper, not it")
    with pytest.raises(ConfigError, match="made with another pepper"):
        check_access(load_config(folder / "headway.yaml"))
    (folder / "pepper").write_bytes(PEPPER + b"\n")
    check_access(load_config(folder / "headway.yaml"))


def test_the_environment_goes_before_the_pepper_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pepper").write_bytes(PEPPER)
    access = load_config(folder / "headway.yaml").access
    assert read_pepper(access) == PEPPER
    monkeypatch.setenv("HEADWAY_KEY_PEPPER", "from the environment")
    assert read_pepper(access) == b"from the environment"


def test_a_short_pepper_is_refused(folder: Path) -> None:
    (folder / "pepper").write_text("short")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        read_pepper(load_config(folder / "headway.yaml").access)


def test_the_version_follows_the_content(folder: Path) -> None:
    KeyStore(folder / "keys.json", PEPPER).create("acme")
    access = load_config(folder / "headway.yaml").access
    before, looked = read_catalogue(access, DEFAULT_TIERS), signature(access)
    assert read_catalogue(access, DEFAULT_TIERS).version == before.version
    KeyStore(folder / "keys.json", PEPPER).create("acme")
    assert signature(access) != looked
    assert read_catalogue(access, DEFAULT_TIERS).version != before.version


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("tenants: [{name: acme, tier: gold}]", "there is no tier gold"),
        ("tenants: [{name: acme, tier: batch, rpm: 0}]", "Expected `int` >= 1"),
        ("tenants: [{name: acme, tier: batch, tmp: 5}]", "unknown field `tmp`"),
        ("tenants: [{name: 'a\\nb', tier: batch}]", "matching regex"),
        ("tenant: []", "unknown field `tenant`"),
        ("tenants: [", "expected"),
    ],
)
def test_a_wrong_tenants_file_is_refused_with_its_name(folder: Path, content: str, reason: str) -> None:
    KeyStore(folder / "keys.json", PEPPER).create("acme")
    (folder / "tenants.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_catalogue(load_config(folder / "headway.yaml").access, DEFAULT_TIERS)
    assert "tenants.yaml" in str(caught.value)
    assert reason in str(caught.value)


def test_half_a_key_file_is_refused_with_its_name(folder: Path) -> None:
    KeyStore(folder / "keys.json", PEPPER).create("acme")
    content = (folder / "keys.json").read_bytes()
    (folder / "keys.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"keys\.json"):
        read_catalogue(load_config(folder / "headway.yaml").access, DEFAULT_TIERS)


def test_an_open_server_is_refused_where_others_reach_it() -> None:
    def config(host: str, *, allow: bool = False) -> ClusterConfig:
        return ClusterConfig(http=HttpConfig(host=host), access=AccessConfig(allow_anonymous=allow))

    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org"):
        with pytest.raises(ConfigError, match="--allow-anonymous"):
            check_access(config(host))
        check_access(config(host, allow=True))
    for host in ("127.0.0.1", "localhost", "::1"):
        check_access(config(host))


def test_an_open_server_says_so() -> None:
    assert "WARNING: no keys are configured" in (warning(ClusterConfig()) or "")
    keyed = msgspec.structs.replace(ClusterConfig(), access=AccessConfig(keys_file="k"))
    assert warning(keyed) is None


def test_paths_are_relative_to_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    access = load_config(Path("headway.yaml")).access
    assert access.keys_file == os.path.realpath(folder / "keys.json")
    assert access.log == "stdout"
