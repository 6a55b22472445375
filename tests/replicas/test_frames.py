import msgspec

from replicas.api import (
    MAX_FRAME_BYTES,
    MAX_UNACKED_FRAMES,
    Credits,
    FinishReason,
    ReplicaLoad,
    StepOutputs,
    TierCredit,
    TokenDelta,
    TokenLogprobs,
    TopLogprob,
)
from replicas.frames import FrameWindow

LOAD = ReplicaLoad(num_running=1)


def open_window() -> FrameWindow:
    window = FrameWindow(replica_epoch=7)
    assert window.connect(0, now=0.0) == []
    return window


def push(window: FrameWindow, *deltas: TokenDelta, now: float = 0.0) -> list[StepOutputs]:
    return decode(window.push(list(deltas), LOAD, sent_at=5.0, now=now))


def decode(frames: list[bytes] | None) -> list[StepOutputs]:
    assert frames is not None
    return [msgspec.msgpack.decode(frame, type=StepOutputs) for frame in frames]


def token(token_id: int, request_id: int = 1) -> TokenDelta:
    return TokenDelta(request_id, 0, 0, [token_id])


def test_a_step_becomes_one_numbered_frame() -> None:
    window = open_window()
    assert push(window, token(10), token(20, request_id=2)) == [
        StepOutputs(7, 1, 5.0, LOAD, [token(10), token(20, request_id=2)])
    ]
    assert [frame.number for frame in push(window, token(11))] == [2]


def test_a_step_without_deltas_can_carry_load_and_credits() -> None:
    credits = Credits(3, (TierCredit(0, 5, 7),))
    (frame,) = decode(open_window().push([], LOAD, 5.0, 0.0, credits))
    assert (frame.number, frame.deltas, frame.credits) == (1, [], credits)


def test_without_room_nothing_is_made_for_credits_alone() -> None:
    assert FrameWindow(7).push([], LOAD, 5.0, 0.0) == []


def test_unacknowledged_frames_are_sent_again_as_they_were() -> None:
    window = open_window()
    sent = [window.push([token(t)], LOAD, 5.0, 0.0) for t in (10, 11, 12)]
    window.acknowledge(1, now=0.0)
    assert window.connect(1, now=0.0) == [*sent[1], *sent[2]]
    assert window.connect(2, now=0.0) == sent[2]


def test_an_acknowledgement_that_overtook_the_subscribe_message_counts() -> None:
    window = open_window()
    sent = [window.push([token(t)], LOAD, 5.0, 0.0) for t in (10, 11)]
    window.acknowledge(1, now=0.0)
    assert window.connect(0, now=0.0) == sent[1]


def test_a_frame_that_was_never_made_cannot_be_continued_from() -> None:
    assert open_window().connect(1, now=0.0) is None


def test_acknowledgements_of_old_and_unknown_frames_change_nothing() -> None:
    window = open_window()
    sent = [window.push([token(t)], LOAD, 5.0, 0.0) for t in (10, 11)]
    window.acknowledge(1, now=0.0)
    for number in (0, 1, 3):
        window.acknowledge(number, now=0.0)
    assert window.connect(0, now=0.0) == sent[1]


def test_without_a_subscription_deltas_of_one_output_are_merged() -> None:
    window = FrameWindow(replica_epoch=7)
    first = TokenDelta(1, 0, 0, [10], logprobs=[TokenLogprobs(-1.0)], num_cached_tokens=4)
    assert push(window, first, token(20, request_id=2)) == []
    last = TokenDelta(1, 0, 0, [11], FinishReason.STOP, [TokenLogprobs(-2.0)], stop_token_id=11)
    assert push(window, last) == []
    assert window.num_pending == 2
    window.connect(0, now=0.0)
    (frame,) = decode(window.flush(LOAD, 6.0))
    merged = TokenDelta(
        1, 0, 0, [10, 11], FinishReason.STOP, [TokenLogprobs(-1.0), TokenLogprobs(-2.0)], 11, 4
    )
    assert frame.deltas == [merged, token(20, request_id=2)]


def test_a_router_that_does_not_acknowledge_gets_no_more_than_the_window() -> None:
    window = open_window()
    frames = [frame for t in range(1000) for frame in push(window, token(t))]
    assert len(frames) == MAX_UNACKED_FRAMES
    assert window.num_pending == 1
    window.acknowledge(MAX_UNACKED_FRAMES, now=0.0)
    (frame,) = decode(window.flush(LOAD, 6.0))
    assert frame.deltas[0].token_ids == list(range(MAX_UNACKED_FRAMES, 1000))
    assert [frame.number for frame in push(window, token(1000))] == [MAX_UNACKED_FRAMES + 2]


def test_what_waits_goes_before_what_is_new() -> None:
    window = FrameWindow(replica_epoch=7)
    push(window, token(10))
    window.connect(0, now=0.0)
    assert [frame.deltas for frame in push(window, token(11))] == [[TokenDelta(1, 0, 0, [10, 11])]]


def test_a_step_with_many_logprobs_is_split_between_outputs() -> None:
    top = tuple(TopLogprob(100_000 + i, -0.5 * i) for i in range(30))
    deltas = [TokenDelta(i, 0, 0, [100_000], logprobs=[TokenLogprobs(-0.1, top)]) for i in range(256)]
    encoded = open_window().push(list(deltas), LOAD, 5.0, 0.0)
    assert len(encoded) == 2
    assert max(map(len, encoded)) < MAX_FRAME_BYTES
    frames = decode(encoded)
    assert [frame.number for frame in frames] == [1, 2]
    assert [delta for frame in frames for delta in frame.deltas] == deltas


def test_one_long_delta_is_split_between_tokens_and_finishes_once() -> None:
    top = tuple(TopLogprob(i, -0.5) for i in range(20))
    logprobs = [TokenLogprobs(-float(i), top) for i in range(1001)]
    delta = TokenDelta(
        1, 2, 3, list(range(1001)), FinishReason.STOP, list(logprobs), 1000, num_cached_tokens=9, error="e"
    )
    encoded = open_window().push([delta], LOAD, 5.0, 0.0)
    assert max(map(len, encoded)) < MAX_FRAME_BYTES
    parts = [delta for frame in decode(encoded) for delta in frame.deltas]
    assert len(parts) == 4
    assert {(part.request_id, part.attempt, part.index) for part in parts} == {(1, 2, 3)}
    assert [t for part in parts for t in part.token_ids] == list(range(1001))
    assert [entry for part in parts for entry in part.logprobs or ()] == logprobs
    assert [part.num_cached_tokens for part in parts] == [9, None, None, None]
    assert [part.finish_reason for part in parts] == [None, None, None, FinishReason.STOP]
    assert [part.stop_token_id for part in parts] == [None, None, None, 1000]
    assert [part.error for part in parts] == [None, None, None, "e"]


def test_stalled_counts_from_the_last_progress_while_something_is_outstanding() -> None:
    window = open_window()
    assert window.stalled_s(now=50.0) == 0.0
    push(window, token(10), now=100.0)
    push(window, token(11), now=103.0)
    assert window.stalled_s(now=104.0) == 4.0
    window.acknowledge(1, now=105.0)
    assert window.stalled_s(now=106.0) == 1.0
    window.acknowledge(2, now=107.0)
    assert window.stalled_s(now=200.0) == 0.0


def test_a_new_subscription_gets_its_own_time_to_acknowledge() -> None:
    window = open_window()
    push(window, token(10), now=100.0)
    window.connect(0, now=108.0)
    assert window.stalled_s(now=109.0) == 1.0
