"""The YAML file of `serve deploy`, read and checked as Serve and our application builder will."""

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import parse_config, read_yaml
from replicas.errors import ConfigError

BUILDER: Final = "cluster.app:build"


def read_serve_file(path: Path) -> dict[str, Any]:
    """Return the document. Raises ConfigError: one line with the file, the place in it and the reason.

    Applications that are not ours are Serve's business. Paths inside are paths of the hosts: not checked.
    """
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a Serve config file holds `applications`, a list")
    check_serve_document(document, str(path))
    return document


def application_names(document: dict[str, Any]) -> list[str]:
    """Return the names that Serve gives the applications of a checked document."""
    return [application.name for application in ServeDeploySchema.model_validate(document).applications]


def check_serve_document(document: dict[str, Any], origin: str) -> None:
    """Raise ConfigError unless Serve takes the document and our builder the arguments in it."""
    try:
        schema = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"{origin}: {f'{place}: ' if place else ''}{first['msg']}") from None
    for application in schema.applications:
        if application.import_path == BUILDER:
            try:
                parse_config(application.args)
            except ConfigError as error:
                raise ConfigError(f"{origin}: application {application.name}: args: {error}") from None
