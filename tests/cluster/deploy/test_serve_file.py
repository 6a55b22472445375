"""Serve config files: Serve's own schema, and our builder's arguments."""

from pathlib import Path

import pytest

from replicas.errors import ConfigError

# Importing ray.serve warns; so what imports it is imported inside.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OURS = "applications: [{name: a, route_prefix: /, import_path: 'cluster.app:build', args: %s}]\n"
TWICE = "applications: [{name: a, import_path: 'x:y'}, {name: a, import_path: 'x:y'}]\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- x\n", "holds `applications`, a list"),
        ("applicatons: []\n", "applications: Field required"),
        ("applications: [{name: a}]\n", "applications.0.import_path: Field required"),
        (OURS % "{replicas: 0}", "application a: args: replicas: Expected `int` >= 1"),
        (OURS % "{engine: {modle: x}}", "args: engine.modle: unknown key; did you mean model?"),
        (
            OURS.replace("}]", "}, {name: a, import_path: 'x:y'}]") % "{}",
            'Found multiple configs for application "a"',
        ),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    from cluster.deploy.serve_file import read_serve_file

    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_serve_file(path)
    assert str(path) in str(refused.value)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_other_applications_are_serves_business(tmp_path: Path) -> None:
    from cluster.deploy.serve_file import read_serve_file

    path = tmp_path / "a.yaml"
    path.write_text("applications: [{name: a, import_path: 'their.app:build', args: {modle: x}}]\n")
    assert read_serve_file(path)["applications"][0]["name"] == "a"


def test_an_application_without_a_name_is_called_as_serve_calls_it() -> None:
    from cluster.deploy.serve_file import application_names

    named = {"name": "b", "route_prefix": "/b", "import_path": "x:y"}
    document = {"applications": [{"import_path": "x:y"}, named]}
    assert application_names(document) == ["default", "b"]
