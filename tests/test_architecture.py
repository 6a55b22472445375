"""ARCHITECTURE.md changes with the code: every module has its line there."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("replicas", "router", "cluster", "deploy", "load")


def test_every_module_has_a_line_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    modules = [
        path.relative_to(ROOT / folder)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert len(modules) > 100
    assert [str(module) for module in modules if f"| `{module}` |" not in text] == []
