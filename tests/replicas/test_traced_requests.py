import msgspec

from replicas.api import FinishReason, TokenDelta
from replicas.traced_requests import EngineTrace, TracedRequests
from tests.replicas.fake_runner import request

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def traced(number: int, **changes: object) -> object:
    return msgspec.structs.replace(request(number, 6), traceparent=PARENT, **changes)  # type: ignore[arg-type]


def delta(number: int, *tokens: int, index: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(number, 0, index, list(tokens), finish)


def test_a_traced_request_is_told_with_its_times_once_it_has_ended() -> None:
    ended: list[EngineTrace] = []
    following = TracedRequests(ended.append)
    following.added("a", traced(1), 1.0)  # type: ignore[arg-type]
    following.stepped({"a": [delta(1)]}, 2.0)
    following.stepped({"a": [delta(1, 5), delta(2, 6)]}, 3.0)
    assert ended == []
    following.stepped({"a": [delta(1, 7, finish=FinishReason.LENGTH)]}, 4.0)
    assert ended == [
        EngineTrace(PARENT, 1.0, 6, 0, first_at=3.0, ended_at=4.0, num_output_tokens=2, how="length")
    ]


def test_it_ends_with_its_last_output() -> None:
    ended: list[EngineTrace] = []
    following = TracedRequests(ended.append)
    following.added("a", traced(1, indexes=(0, 1)), 1.0)  # type: ignore[arg-type]
    following.stepped({"a": [delta(1, 5, index=1, finish=FinishReason.STOP)]}, 2.0)
    following.aborted("a", 1, 0, 3.0)
    assert [(trace.how, trace.ended_at) for trace in ended] == [("abort", 3.0)]


def test_an_abort_of_the_whole_request_ends_it() -> None:
    ended: list[EngineTrace] = []
    following = TracedRequests(ended.append)
    following.added("a", traced(1, indexes=(0, 1)), 1.0)  # type: ignore[arg-type]
    following.aborted("a", 1, None, 2.0)
    following.aborted("a", 1, None, 3.0)
    assert len(ended) == 1


def test_the_same_id_of_another_router_is_another_request() -> None:
    ended: list[EngineTrace] = []
    following = TracedRequests(ended.append)
    following.added("a", traced(1), 1.0)  # type: ignore[arg-type]
    following.stepped({"b": [delta(1, 5, finish=FinishReason.STOP)]}, 2.0)
    assert ended == []


def test_what_nobody_traces_is_not_followed() -> None:
    ended: list[EngineTrace] = []
    following = TracedRequests(ended.append)
    following.added("a", request(1, 6), 1.0)
    following.stepped({"a": [delta(1, 5, finish=FinishReason.STOP)]}, 2.0)
    assert ended == []
