from replicas.progress import PhaseTimer


def test_a_start_is_measured_by_its_phases() -> None:
    now = [0.0]
    told: list[tuple[str, float | None]] = []
    timer = PhaseTimer(lambda what, share: told.append((what, share)), "importing", lambda: now[0])
    for at, what, share in ((2.0, "loading", 0.0), (3.0, "loading", 0.9), (7.0, "warming up", None)):
        now[0] = at
        timer(what, share)
    now[0] = 7.5
    assert timer.finish() == {"importing": 2.0, "loading": 5.0, "warming up": 0.5}
    assert told == [("loading", 0.0), ("loading", 0.9), ("warming up", None)]
