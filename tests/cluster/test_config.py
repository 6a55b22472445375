"""cluster.config: what is accepted, and how precisely the rest is refused."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, load_config, parse_config
from replicas.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headway.yaml"
    path.write_text(text)
    return path


def refusal(document: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    return str(caught.value)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == ClusterConfig()


def test_sections_reach_their_structs(tmp_path: Path) -> None:
    engine = "engine: {model: m, tier_itl_target_ms: {0: 50}}"
    config = load_config(
        write(tmp_path, f"replicas: 2\n{engine}\nhttp: {{port: 9}}\nrouter: {{replicas: 3}}")
    )
    assert (config.replicas, config.router.replicas, config.http.port) == (2, 3, 9)
    assert (config.engine.model, config.engine.tier_itl_target_ms) == ("m", {0: 50.0})


def test_tier_numbers_may_be_strings_as_json_has_them() -> None:
    assert parse_config({"engine": {"tier_itl_target_ms": {"1": 80}}}).engine.tier_itl_target_ms == {1: 80.0}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"replica": 2}, "replica: unknown key; did you mean replicas?"),
        ({"engine": {"max_num_seq": 2}}, "engine.max_num_seq: unknown key; did you mean max_num_seqs?"),
        ({"router": {"zzz": 1}}, "router.zzz: unknown key; known here: replicas, labels"),
        (
            {"router": {3: 1}},
            "router.3: unknown key; known here: replicas, labels",
        ),
        ({"http": {"port": 70000}}, "http.port: Expected `int` <= 65535"),
        ({"replicas": 0}, "replicas: Expected `int` >= 1"),
        ({"autoscaling": {"max_replica": 3}}, "autoscaling: Object contains unknown field `max_replica`"),
        (
            {"autoscaling": {"min_replicas": 3, "max_replicas": 2}},
            "autoscaling: min_replicas 3 is above max_replicas 2",
        ),
        (
            {"replicas": 5, "autoscaling": {"max_replicas": 4}},
            "replicas: 5 at the start is not within autoscaling's 1 to 4",
        ),
        (
            {"autoscaling": {"max_replicas": 4, "tiers": [{"name": "a", "level": 0}]}},
            "autoscaling.tiers: the tiers are those of the section `tiers`",
        ),
        ({"replicas": True}, "replicas: Expected `int`, got `bool`"),
        ({"engine": {"device": "tpu"}}, "engine.device: Invalid enum value 'tpu'"),
        ({"engine": []}, "engine: Expected `object`, got `array`"),
        ([1], "Expected `object`, got `array`"),
        ("headway", "Expected `object`, got `str`"),
    ],
)
def test_a_bad_document_is_refused_with_path_and_reason(document: object, message: str) -> None:
    assert refusal(document) == message


def test_a_name_with_a_slash_is_refused() -> None:
    assert refusal({"name": "a/b"}).startswith("name: Expected `str` matching regex")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: No such file or directory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas: 1\nreplicas: 2\n", ":2:1: the key 'replicas' is given twice"),
        ("replicas: [1\n", ":2:1: expected ',' or ']', but got '<stream end>'"),
        ("name: \x00\n", ": unacceptable character #x0000: special characters are not allowed"),
        ("engine: {model: !!python/name:os.system x}\n", ":1:17: could not determine a constructor"),
        ("http: {prot: 1}\n", ": http.prot: unknown key; did you mean port?"),
    ],
)
def test_a_bad_file_is_refused_on_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 at byte 9"):
        load_config(path)
