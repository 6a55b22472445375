"""docs/cases.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "cases.md").read_text()


def named_tests() -> list[tuple[str, str]]:
    """File and test of every mention; a test alone belongs to the file before it, "" = the whole file."""
    named = []
    file = ""
    for found in re.finditer(r"`((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", TABLE):
        file = found[1] or file
        named.append((file, found[2] or ""))
    return named


def test_every_test_of_the_table_exists() -> None:
    missing = [
        (file, test)
        for file, test in named_tests()
        if not (TESTS / file).is_file() or (test and f"def {test}(" not in (TESTS / file).read_text())
    ]
    assert not missing


def test_every_case_has_a_row_with_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 35))
    assert all("test_" in row for row in rows)
