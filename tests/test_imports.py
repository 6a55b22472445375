"""The import rules of the project, proved by parsing every file."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("replicas", "router", "cluster", "deploy", "load")

MAY_IMPORT = {  # of ours; a package may always import itself
    "replicas": (),
    "router": ("replicas.api", "replicas.step_record"),
    "load": (),
    "deploy": (),
    "cluster": ("replicas*", "router*", "deploy*", "load*"),
}
ONLY_IN = {
    "ray": (
        "cluster/app.py",
        "cluster/deployments.py",
        "cluster/metrics/exporter.py",
        "cluster/serve_policy.py",
        "cluster/serve_scaling.py",
        "cluster/serve_victim.py",
        "cluster/cli.py",
        "cluster/deploy/cluster_file.py",
        "cluster/deploy/serve_file.py",
        "cluster/deploy/head.py",
        "router/pinned_router.py",
    ),
    "torch": (
        "replicas/model*.py",
        "replicas/runner*.py",
        "replicas/cuda_graphs.py",
        "replicas/attention/*.py",
        "replicas/sampling*.py",
        "replicas/gpu_check/*.py",
    ),
}
NAMELESS = ("utils", "util", "common", "helpers", "helper", "misc")


def imported_modules(source: str, path: str) -> Iterator[str]:
    """Every module that the source of the file at `path` imports, by its full name, inner scopes too.

    `from package import name` counts as `package.name` inside our packages, where `name` may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = Path(path).parts[: -node.level]
                module = ".".join([*parents, *filter(None, [module])])
            if module in PACKAGES:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def broken_rules(source: str, path: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the root, posix)."""
    package = Path(path).parts[0]
    problems = []
    for module in imported_modules(source, path):
        top = module.partition(".")[0]
        if top in ("tests", *PACKAGES) and top != package and not matches(module, MAY_IMPORT[package]):
            problems.append(f"{path} imports {module}: {package} must not")
        if top in ONLY_IN and not matches(path, ONLY_IN[top]):
            problems.append(f"{path} imports {module}: {top} belongs to {', '.join(ONLY_IN[top])}")
    return problems


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def source_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_file_keeps_the_import_rules() -> None:
    files = source_files(*PACKAGES)
    assert {path.relative_to(ROOT).parts[0] for path in files} == set(PACKAGES)
    assert [
        problem
        for path in files
        for problem in broken_rules(path.read_text(), path.relative_to(ROOT).as_posix())
    ] == []


def test_every_file_is_named_by_what_it_holds() -> None:
    files = source_files(*PACKAGES, "tests")
    assert [path for path in files if path.stem in NAMELESS or path.parent.name in NAMELESS] == []


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in source_files(*PACKAGES, "tests")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("replicas/engine.py", "from router.app import build_app"),
        ("replicas/engine.py", "def f():\n    import cluster.app"),
        ("replicas/engine.py", "import torch.nn"),
        ("replicas/engine.py", "from ray import serve"),
        ("replicas/engine.py", "from tests.wire_world import World"),
        ("replicas/attention/base.py", "from ...router import app"),
        ("router/app.py", "from replicas.engine import Engine"),
        ("router/app.py", "from replicas import engine"),
        ("router/app.py", "import replicas.api, ray"),
        ("load/client.py", "from replicas.api import TokenDelta"),
        ("deploy/push.py", "import cluster.config"),
        ("cluster/config.py", "import ray"),
        ("cluster/autoscaling.py", "if TYPE_CHECKING:\n    import torch"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str) -> None:
    assert broken_rules(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("replicas/engine.py", "from replicas.sessions import Sessions\nimport asyncio"),
        ("replicas/engine.py", "from . import api"),
        ("replicas/model_gguf.py", "import torch"),
        ("replicas/attention/flash.py", "from torch import nn"),
        ("router/app.py", "from replicas.api import TokenDelta"),
        ("router/app.py", "from replicas import api"),
        ("router/pinned_router.py", "from ray.serve.request_router import RequestRouter"),
        ("cluster/app.py", "import ray, router.app, replicas.pump, load.report, deploy.push"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, source: str) -> None:
    assert broken_rules(source, path) == []
