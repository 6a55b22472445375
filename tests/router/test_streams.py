import pytest

from replicas.api import (
    Abort,
    BatchReply,
    CommandBatch,
    Credits,
    FinishReason,
    ReplicaLoad,
    StepOutputs,
    Submit,
    Subscribe,
    TierCredit,
    TokenDelta,
)
from router.streams import (
    ACK_FRAMES,
    MAX_LOST_BATCHES,
    EpochOverError,
    ReplicaStreams,
    SubscriptionBrokenError,
)
from tests.wire_world import make_request

REPLICA_EPOCH = 7


@pytest.fixture
def streams() -> ReplicaStreams:
    return ReplicaStreams("r", epoch=3, replica_epoch=REPLICA_EPOCH, block_size=16)


def make_batch(*commands: Submit | Abort, first: int = 1, acked: int = 0) -> CommandBatch:
    return CommandBatch(
        router_id="r", router_epoch=3, first_number=first, commands=commands, acked_frame=acked
    )


def make_reply(applied: int, load: ReplicaLoad | None = None) -> BatchReply:
    return BatchReply(replica_epoch=REPLICA_EPOCH, applied_through=applied, load=load)


def make_frame(number: int, *deltas: TokenDelta, num_running: int = 0) -> StepOutputs:
    return StepOutputs(REPLICA_EPOCH, number, 0.0, ReplicaLoad(num_running=num_running), list(deltas))


def token(request_id: int, token_id: int, finish: FinishReason | None = None, index: int = 0) -> TokenDelta:
    return TokenDelta(request_id, 0, index, [token_id], finish)


# Commands


def test_all_commands_since_the_last_batch_travel_together(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.submit(make_request(2))
    streams.abort(1)
    assert streams.take_batch() == make_batch(Submit(make_request(1)), Submit(make_request(2)), Abort(1, 0))
    assert streams.take_batch() == make_batch(first=4)


def test_a_batch_can_leave_before_the_one_before_it_is_answered(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.take_batch()
    streams.submit(make_request(2))
    assert streams.wants_batch
    assert streams.take_batch() == make_batch(Submit(make_request(2)), first=2)
    assert not streams.wants_batch


def test_after_a_lost_batch_everything_unapplied_is_sent_again(streams: ReplicaStreams) -> None:
    for request_id in (1, 2, 3):
        streams.submit(make_request(request_id))
        streams.take_batch()
    streams.replied(make_reply(1))
    streams.lost()
    assert streams.wants_batch
    assert streams.take_batch() == make_batch(Submit(make_request(2)), Submit(make_request(3)), first=2)


def test_commands_that_the_replica_dropped_are_sent_again(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.submit(make_request(2))
    streams.take_batch()
    streams.replied(make_reply(1))
    assert streams.take_batch() == make_batch(Submit(make_request(2)), first=2)


def test_commands_are_not_repeated_while_their_batch_is_under_way(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.take_batch()
    streams.take_batch()
    streams.replied(make_reply(0))
    assert not streams.wants_batch


def test_replies_in_the_wrong_order_are_fine(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.take_batch()
    streams.submit(make_request(2))
    streams.take_batch()
    streams.replied(make_reply(2))
    streams.replied(make_reply(1))
    assert not streams.wants_batch
    assert streams.take_batch() == make_batch(first=3)


def test_too_many_lost_batches_in_a_row_end_the_epoch(streams: ReplicaStreams) -> None:
    for _ in range(MAX_LOST_BATCHES - 1):
        streams.take_batch()
        streams.lost()
    streams.take_batch()
    with pytest.raises(EpochOverError):
        streams.lost()


def test_an_answered_ping_forgives_lost_ones(streams: ReplicaStreams) -> None:
    for _ in range(3 * MAX_LOST_BATCHES):
        streams.take_batch()
        streams.lost()
        streams.take_batch()
        streams.replied(make_reply(0))


def test_answered_pings_do_not_hide_a_command_that_never_arrives(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    with pytest.raises(EpochOverError):  # noqa: PT012
        for _ in range(MAX_LOST_BATCHES):
            streams.take_batch()
            streams.take_batch()
            streams.replied(make_reply(0))
            streams.lost()


@pytest.mark.parametrize(
    "reply",
    [
        BatchReply(replica_epoch=REPLICA_EPOCH + 1, applied_through=0),
        BatchReply(replica_epoch=REPLICA_EPOCH, applied_through=0, ended=True),
    ],
    ids=["replica started anew", "replica ended the epoch"],
)
def test_a_reply_can_end_the_epoch(streams: ReplicaStreams, reply: BatchReply) -> None:
    streams.take_batch()
    with pytest.raises(EpochOverError):
        streams.replied(reply)


# Frames


def test_deltas_come_out_once_and_in_order(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    first, second = make_frame(1, token(1, 10)), make_frame(2, token(1, 11))
    assert streams.receive(first) == [token(1, 10)]
    assert streams.receive(first) == []
    assert streams.receive(second) == [token(1, 11)]
    assert streams.receive(first) == []


def test_a_gap_breaks_the_subscription_which_continues_where_it_broke(streams: ReplicaStreams) -> None:
    assert streams.next_subscribe() == Subscribe(router_id="r", router_epoch=3)
    streams.receive(make_frame(1))
    with pytest.raises(SubscriptionBrokenError):
        streams.receive(make_frame(3))
    assert streams.next_subscribe() == Subscribe(router_id="r", router_epoch=3, number=2, received_frame=1)
    assert streams.take_batch().acked_frame == 1


def test_a_frame_of_another_replica_epoch_ends_the_epoch(streams: ReplicaStreams) -> None:
    with pytest.raises(EpochOverError):
        streams.receive(StepOutputs(REPLICA_EPOCH + 1, 1, 0.0, ReplicaLoad()))


def test_many_frames_are_acknowledged_without_waiting_for_a_ping(streams: ReplicaStreams) -> None:
    for number in range(1, ACK_FRAMES):
        streams.receive(make_frame(number))
    assert not streams.wants_batch
    streams.receive(make_frame(ACK_FRAMES))
    assert streams.wants_batch
    assert streams.take_batch() == make_batch(acked=ACK_FRAMES)
    assert not streams.wants_batch


def test_deltas_of_unknown_aborted_finished_and_stale_outputs_are_dropped(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.submit(make_request(2, n=2))
    streams.submit(make_request(3, attempt=1))
    streams.abort(1)
    last = token(2, 20, FinishReason.STOP)
    frame = make_frame(1, token(1, 10), last, token(2, 21), token(3, 30), token(4, 40), token(2, 22, index=1))
    assert streams.receive(frame) == [last, token(2, 22, index=1)]


def test_an_aborted_output_brings_nothing_more_and_the_last_one_ends_the_request(
    streams: ReplicaStreams,
) -> None:
    streams.submit(make_request(1, n=2))
    streams.abort(1, 1)
    streams.abort(1, 1)
    assert streams.num_outputs == 1
    assert streams.receive(make_frame(1, token(1, 10), token(1, 11, index=1))) == [token(1, 10)]
    streams.abort(1, 0)
    assert streams.take_batch().commands[1:] == (Abort(1, 0, 1), Abort(1, 0))
    assert streams.fail("lost") == []


def test_failing_ends_every_open_output_once(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1))
    streams.submit(make_request(2, attempt=1, n=3))
    streams.submit(make_request(3))
    streams.abort(3)
    finished = TokenDelta(2, 1, 1, [5], FinishReason.STOP)
    streams.receive(make_frame(1, finished))
    assert streams.fail("lost") == [
        TokenDelta(1, 0, 0, [], FinishReason.ERROR, error="lost"),
        TokenDelta(2, 1, 0, [], FinishReason.ERROR, error="lost"),
        TokenDelta(2, 1, 2, [], FinishReason.ERROR, error="lost"),
    ]
    assert streams.fail("lost") == []
    assert streams.num_outputs == 0


# What routing and draining look at


def test_quiet_means_no_open_output_and_no_unapplied_command(streams: ReplicaStreams) -> None:
    assert streams.is_quiet
    streams.submit(make_request(1))
    streams.take_batch()
    streams.replied(make_reply(1))
    assert not streams.is_quiet
    streams.abort(1)
    assert not streams.is_quiet
    streams.take_batch()
    streams.replied(make_reply(2))
    assert streams.is_quiet


def test_busy_counts_own_outputs_exactly_and_others_as_reported(streams: ReplicaStreams) -> None:
    streams.submit(make_request(1, n=2))
    assert streams.num_busy == 2
    streams.receive(make_frame(1, num_running=5))
    assert streams.num_busy == 5
    streams.submit(make_request(2))
    assert streams.num_busy == 6
    streams.abort(1)
    assert streams.num_busy == 4


def test_replies_report_the_load_too(streams: ReplicaStreams) -> None:
    streams.take_batch()
    streams.replied(make_reply(0, ReplicaLoad(num_running=2, num_waiting=3)))
    assert streams.num_busy == 5


def test_a_report_that_was_overtaken_by_a_newer_one_is_ignored(streams: ReplicaStreams) -> None:
    frame = StepOutputs(
        REPLICA_EPOCH, 1, 0.0, ReplicaLoad(num_running=0), [], Credits(8, (TierCredit(0, 4, 9),))
    )
    reply = BatchReply(
        replica_epoch=REPLICA_EPOCH,
        applied_through=0,
        load=ReplicaLoad(num_running=3),
        credits=Credits(7, (TierCredit(0, 1, 9),)),
    )
    streams.take_batch()
    streams.receive(frame)
    streams.replied(reply)
    assert streams.num_busy == 0
    assert streams.room(0).num_outputs == 4
