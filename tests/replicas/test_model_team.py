import threading
from typing import Any

import pytest

from replicas import model_team
from replicas.model_team import Team


def test_a_helper_that_is_called_on_its_way_to_sleep_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the GIL there, for as long as the caller prepares its job."""
    made, looked_again = threading.Event(), threading.Event()
    teams: list[Team] = []

    def follow(state: Any, patience: Any) -> None:  # noqa: ARG001 - as the kernel's
        made.wait()
        if teams:
            teams.pop().wake()
        else:
            looked_again.set()

    monkeypatch.setattr(model_team.kernels, "follow", follow)
    teams.append(Team(2))
    made.set()
    assert looked_again.wait(timeout=60)
