import queue

import msgspec

from cluster.autoscaling import Code, Decision, Observation, Reason, State
from cluster.serve_scaling import MAX_NOTES, DecisionNotes
from router.scaling import ScalingNote

SEEN = Observation(target=1, running=1)


def decision(target: int, text: str = "why") -> Decision:
    return Decision(target=target, reasons=(Reason(code=next(iter(Code)), text=text),), state=State())


def test_decisions_are_noted_when_they_change_the_newest_first() -> None:
    written: queue.Queue[tuple[str, bytes]] = queue.Queue()
    notes = DecisionNotes(put=lambda application, data: written.put((application, data)), clock=lambda: 5.0)
    for target in (1, 1, 1, 2):
        notes("app", SEEN, decision(target, f"to {target}"))
    said = [written.get(timeout=10) for _ in range(2)]
    assert written.empty()
    longest = max(said, key=lambda one: len(one[1]))
    assert longest[0] == "app"
    assert msgspec.json.decode(longest[1], type=list[ScalingNote]) == [
        ScalingNote(at=5.0, target=2, running=1, reasons=["to 2"]),
        ScalingNote(at=5.0, target=1, running=1, reasons=["to 1"]),
    ]


def test_old_decisions_are_forgotten() -> None:
    written: queue.Queue[bytes] = queue.Queue()
    notes = DecisionNotes(put=lambda _, data: written.put(data))
    for target in range(MAX_NOTES + 5):
        notes("app", SEEN, decision(target))
    sizes = [len(msgspec.json.decode(written.get(timeout=10))) for _ in range(MAX_NOTES + 5)]
    assert max(sizes) == MAX_NOTES
