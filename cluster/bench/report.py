"""What all benchmark reports share: percentiles, the commit, and how they are printed."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[min(len(ordered), max(1, rank)) - 1]


def commit() -> str:
    """The commit this code was checked out at, with `+` if files differ from it; `unknown` if none."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def progress(text: str, fraction: float | None = None) -> None:
    """One line for a person; stdout stays free for the report. Parts of a whole stay silent."""
    if fraction is None:
        print(text, file=sys.stderr, flush=True)


def print_report(report: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps({key: _rounded(value) for key, value in report.items()}))
        return
    width = max(len(key) for key in report)
    for key, value in report.items():
        print(f"{key:<{width}}  {_rounded(value)}")


def _rounded(value: object) -> object:
    """Floats to four significant digits, inner ones too; what JSON lacks, NaN and infinity, to None."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
