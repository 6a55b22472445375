"""How far loading has come, told from a replica's process to the command line through a folder.

A replica that is being constructed answers no calls, and Serve wraps what it raises into pages of
traceback. So each replica keeps one small file in a folder that the local cluster shares.
"""

import os
from pathlib import Path

import msgspec

from replicas.api import ModelCard
from replicas.errors import EngineError


class LoadState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica's state as of its last word."""

    doing: str = ""
    share: float | None = None
    """How much of that is done, in [0, 1]; None = unknown."""
    card: ModelCard | None = None
    """Set when the replica is ready."""
    facts: tuple[str, ...] = ()
    """How its engine runs, a few words each."""
    phases: dict[str, float] = {}
    """What its start consisted of, in seconds. Set when the replica is ready."""
    error: str | None = None
    """Set when loading failed; one line."""
    is_users: bool = False
    """The error is of a kind that its user can mend: a setting, the model, too little memory."""


class ProgressFile:
    """A replica's side."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._state = LoadState()

    @classmethod
    def open(cls, folder: str | None, replica: str) -> "ProgressFile":
        """Report into `folder`; None reports nowhere (a cluster without a shared folder)."""
        return cls(None if folder is None else Path(folder) / f"{replica}.json")

    def note(self, doing: str, share: float | None) -> None:
        """Say what is being done; a replicas.progress.Progress."""
        self._write(LoadState(doing=doing, share=share))

    def finish(self, card: ModelCard, facts: tuple[str, ...], phases: dict[str, float]) -> None:
        self._write(LoadState(doing="ready", share=1.0, card=card, facts=facts, phases=phases))

    def fail(self, error: Exception) -> None:
        line = " ".join(str(error).split())[:1000] or type(error).__name__
        is_users = isinstance(error, EngineError | MemoryError)
        self._write(
            LoadState(error=line if is_users else f"{type(error).__name__}: {line}", is_users=is_users)
        )

    def _write(self, state: LoadState) -> None:
        if self._path is None or state == self._state:
            return
        self._state = state
        draft = self._path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(state))
        os.replace(draft, self._path)  # a reader never sees half a file


def read_progress(folder: Path) -> list[LoadState]:
    """Return the state of every replica that has reported, those that are not ready first."""
    states = [msgspec.json.decode(path.read_bytes(), type=LoadState) for path in folder.glob("*.json")]
    return sorted(states, key=lambda state: (state.card is not None, state.share or 0.0))
