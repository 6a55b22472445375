from pathlib import Path

import pytest

from load.errors import LoadError
from load.tenants import Slo, parse_slo, read_cast


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    return path


def test_tenants_with_shares_rates_and_tiers(tmp_path: Path) -> None:
    cast = read_cast(
        write(
            tmp_path,
            "tenants:\n"
            "- {name: a, tier: interactive, api_key: k1, share: 3}\n"
            "- {name: b, tier: batch, rate: 2.5, weight: 4}\n"
            "tiers:\n  interactive: {ttft: 500, itl: 50}\n",
        )
    )
    assert [source.share for source in cast.sources] == [3.0, 0.0]
    assert [source.rate for source in cast.sources] == [None, 2.5]
    assert cast.tenants[0].api_key == "k1"
    assert cast.slo("interactive") == Slo(ttft=500, itl=50)
    assert cast.slo("batch") is None


def test_a_key_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "tenants: [{name: a, api_key_env: KEY_OF_A}]")
    with pytest.raises(LoadError, match="KEY_OF_A"):
        read_cast(path)
    monkeypatch.setenv("KEY_OF_A", "secret")
    assert read_cast(path).tenants[0].api_key == "secret"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants: [{name: a, teir: x}]", "teir"),
        ("tenants: []", "one entry"),
        ("tenants: [{name: a}, {name: a}]", "different names"),
        ("tenants: [{name: a, rate: 0}]", "rate > 0"),
        ("tenants: [{name: a, share: many}]", "share"),
        ("tenants: [", "parsing"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(LoadError, match=problem):
        read_cast(write(tmp_path, text))


def test_promises_from_the_command_line() -> None:
    assert parse_slo(["ttft=500,itl=50", "batch:e2e=9000"]) == {
        "": Slo(ttft=500, itl=50),
        "batch": Slo(e2e=9000),
    }


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "tft=3", "ttft=1=2"])
def test_a_promise_that_cannot_be_read(text: str) -> None:
    with pytest.raises(LoadError, match="ttft=500"):
        parse_slo([text])
