import msgspec
import pytest

from replicas.api import (
    LEASE_GRACE_S,
    LEASE_S,
    MAX_UNACKED_FRAMES,
    MAX_UNACKED_S,
    REOPEN_S,
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
    TierDemand,
    TokenDelta,
)
from replicas.effects import AbortRequest, AddRequest, Delivery, Effects, EngineCommand
from replicas.session import MAX_EARLY_COMMANDS
from replicas.sessions import Applied, Sessions
from tests.wire_world import CAPACITY, make_request

REPLICA_EPOCH = 7
LOAD = ReplicaLoad(num_running=3)


def make_batch(*commands: Submit | Abort, first: int = 1, epoch: int = 1, acked: int = 0) -> CommandBatch:
    return CommandBatch(
        router_id="r", router_epoch=epoch, first_number=first, commands=commands, acked_frame=acked
    )


def make_subscribe(*, epoch: int = 1, number: int = 1, received: int = 0) -> Subscribe:
    return Subscribe(router_id="r", router_epoch=epoch, number=number, received_frame=received)


def submit(request_id: int, attempt: int = 0, n: int = 1) -> Submit:
    return Submit(make_request(request_id, attempt=attempt, n=n))


def add(request_id: int, attempt: int = 0, owner: str = "r:1") -> AddRequest:
    return AddRequest(owner=owner, request=make_request(request_id, attempt=attempt))


def end(request_id: int, attempt: int = 0, owner: str = "r:1") -> AbortRequest:
    return AbortRequest(owner=owner, request_id=request_id, attempt=attempt)


def token(request_id: int, token_id: int, finish: FinishReason | None = None, index: int = 0) -> TokenDelta:
    return TokenDelta(request_id, 0, index, [token_id], finish)


def commands_of(applied: Applied) -> list[EngineCommand]:
    return applied.effects.commands


def deltas_of(effects: Effects) -> list[tuple[int, list[TokenDelta]]]:
    """(subscription, deltas) of every frame."""
    return [
        (delivery.subscription, msgspec.msgpack.decode(frame, type=StepOutputs).deltas)
        for delivery in effects.deliveries
        for frame in delivery.frames
    ]


def ended(subscription: int) -> Delivery:
    return Delivery(subscription=subscription, frames=[], ended=True)


def publish(sessions: Sessions, *deltas: TokenDelta, owner: str = "r:1", now: float = 0.0) -> Effects:
    return sessions.publish({owner: list(deltas)}, LOAD, now, sent_at=5.0)


@pytest.fixture
def sessions() -> Sessions:
    """One router, "r" in epoch 1, subscribed under key 100 at time 0."""
    sessions = Sessions(REPLICA_EPOCH, CAPACITY)
    assert sessions.subscribe(100, make_subscribe(), now=0.0) == Effects()
    return sessions


# Commands


def test_commands_go_to_the_engine_in_order(sessions: Sessions) -> None:
    applied = sessions.apply(make_batch(submit(1), submit(2), Abort(1, 0)), now=0.0)
    assert commands_of(applied) == [add(1), add(2), end(1)]
    credits = Credits(2, (TierCredit(0, 2 + 8, 2),))
    assert applied.reply == BatchReply(
        replica_epoch=REPLICA_EPOCH, applied_through=3, load=ReplicaLoad(), credits=credits
    )


def test_early_commands_wait_for_the_missing_ones(sessions: Sessions) -> None:
    early = sessions.apply(make_batch(submit(3), first=3), now=0.0)
    assert (commands_of(early), early.reply.applied_through) == ([], 0)
    missing = sessions.apply(make_batch(submit(1), submit(2)), now=0.0)
    assert (commands_of(missing), missing.reply.applied_through) == ([add(1), add(2), add(3)], 3)


def test_repeated_commands_are_applied_once(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1), submit(2)), now=0.0)
    again = sessions.apply(make_batch(submit(2), submit(3), first=2), now=0.0)
    assert (commands_of(again), again.reply.applied_through) == ([add(3)], 3)


def test_commands_too_far_ahead_are_left_to_be_repeated(sessions: Sessions) -> None:
    many = [submit(number) for number in range(1, MAX_EARLY_COMMANDS + 3)]
    sessions.apply(make_batch(*many[1:], first=2), now=0.0)
    applied = sessions.apply(make_batch(many[0]), now=0.0)
    assert applied.reply.applied_through == MAX_EARLY_COMMANDS
    applied = sessions.apply(make_batch(*many[-2:], first=MAX_EARLY_COMMANDS + 1), now=0.0)
    assert applied.reply.applied_through == MAX_EARLY_COMMANDS + 2


def test_a_submit_of_a_known_attempt_is_ignored(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1, attempt=1)), now=0.0)
    applied = sessions.apply(make_batch(submit(1, attempt=1), submit(1, attempt=0), first=2), now=0.0)
    assert commands_of(applied) == []


def test_a_submit_of_a_finished_attempt_is_ignored(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    publish(sessions, token(1, 10, FinishReason.STOP))
    assert commands_of(sessions.apply(make_batch(submit(1), first=2), now=0.0)) == []


def test_a_higher_attempt_replaces_the_lower_one(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    applied = sessions.apply(make_batch(submit(1, attempt=1), first=2), now=0.0)
    assert commands_of(applied) == [end(1), add(1, attempt=1)]
    assert deltas_of(publish(sessions, token(1, 10))) == []


def test_an_abort_of_an_unknown_request_keeps_a_late_submit_dead(sessions: Sessions) -> None:
    applied = sessions.apply(make_batch(Abort(1, 0), submit(1), submit(1, attempt=1)), now=0.0)
    assert commands_of(applied) == [add(1, attempt=1)]


def test_an_abort_of_a_stale_attempt_leaves_the_current_one(sessions: Sessions) -> None:
    applied = sessions.apply(make_batch(submit(1, attempt=1), Abort(1, 0)), now=0.0)
    assert commands_of(applied) == [add(1, attempt=1)]


def test_one_output_is_aborted_and_the_request_ends_with_its_last(sessions: Sessions) -> None:
    applied = sessions.apply(make_batch(submit(1, n=2), Abort(1, 0, 1), Abort(1, 0, 1)), now=0.0)
    aborted = AbortRequest(owner="r:1", request_id=1, attempt=0, index=1)
    assert commands_of(applied)[1:] == [aborted]
    effects = publish(sessions, token(1, 10), token(1, 20, index=1))
    assert deltas_of(effects) == [(100, [token(1, 10)])]
    applied = sessions.apply(make_batch(Abort(1, 0, 0), submit(1), first=4), now=0.0)
    assert len(commands_of(applied)) == 1
    assert sessions.num_open_requests == 0


def test_an_abort_of_an_output_of_a_stale_attempt_changes_nothing(sessions: Sessions) -> None:
    applied = sessions.apply(make_batch(submit(1, attempt=1), Abort(1, 0, 0)), now=0.0)
    assert commands_of(applied) == [add(1, attempt=1)]


# Frames


def test_deltas_go_to_the_subscription_of_their_owner(sessions: Sessions) -> None:
    other = Subscribe(router_id="q", router_epoch=4)
    sessions.subscribe(200, other, now=0.0)
    sessions.apply(make_batch(submit(1)), now=0.0)
    batch = CommandBatch(router_id="q", router_epoch=4, first_number=1, commands=(submit(1),))
    assert commands_of(sessions.apply(batch, now=0.0)) == [add(1, owner="q:4")]
    outputs = {"r:1": [token(1, 10)], "q:4": [token(1, 20)], "gone:1": [token(1, 30)]}
    effects = sessions.publish(outputs, LOAD, now=0.0, sent_at=5.0)
    assert deltas_of(effects) == [(100, [token(1, 10)]), (200, [token(1, 20)])]


def test_deltas_of_aborted_and_finished_outputs_go_no_further(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1), submit(2, n=2), Abort(1, 0)), now=0.0)
    effects = publish(sessions, token(1, 10), token(2, 20, FinishReason.STOP), token(2, 30, index=1))
    assert deltas_of(effects) == [(100, [token(2, 20, FinishReason.STOP), token(2, 30, index=1)])]
    effects = publish(sessions, token(2, 21), token(2, 31, FinishReason.LENGTH, index=1))
    assert deltas_of(effects) == [(100, [token(2, 31, FinishReason.LENGTH, index=1)])]
    assert sessions.num_open_requests == 0


def test_an_acknowledgement_releases_what_waited_for_room(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    for number in range(MAX_UNACKED_FRAMES):
        publish(sessions, token(1, number))
    assert deltas_of(publish(sessions, token(1, 999), now=0.0)) == []
    applied = sessions.apply(make_batch(first=2, acked=1), now=0.0)
    assert deltas_of(applied.effects) == [(100, [token(1, 999)])]


def test_a_new_subscription_continues_after_the_last_frame_received(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    publish(sessions, token(1, 10))
    publish(sessions, token(1, 11))
    sessions.unsubscribe(100)
    assert deltas_of(publish(sessions, token(1, 12))) == []
    effects = sessions.subscribe(101, make_subscribe(number=2, received=1), now=0.0)
    assert deltas_of(effects) == [(101, [token(1, 11)]), (101, [token(1, 12)])]


def test_a_new_subscription_ends_the_one_before_it(sessions: Sessions) -> None:
    effects = sessions.subscribe(101, make_subscribe(number=2), now=0.0)
    assert effects.deliveries == [ended(100)]
    sessions.unsubscribe(100)
    sessions.apply(make_batch(submit(1)), now=0.0)
    assert deltas_of(publish(sessions, token(1, 10))) == [(101, [token(1, 10)])]


def test_a_subscribe_message_that_arrives_late_is_refused(sessions: Sessions) -> None:
    sessions.subscribe(101, make_subscribe(number=3), now=0.0)
    assert sessions.subscribe(102, make_subscribe(number=2), now=0.0).deliveries == [ended(102)]
    sessions.apply(make_batch(submit(1)), now=0.0)
    assert deltas_of(publish(sessions, token(1, 10))) == [(101, [token(1, 10)])]


def test_replies_carry_the_load_of_the_last_step(sessions: Sessions) -> None:
    publish(sessions)
    assert sessions.apply(make_batch(), now=0.0).reply.load == LOAD


def test_a_router_that_waits_for_a_seat_hears_of_one_without_having_outputs_there(
    sessions: Sessions,
) -> None:
    sessions.apply(make_batch(*(submit(number) for number in range(1, 10))), now=0.0)
    sessions.subscribe(200, Subscribe(router_id="q", router_epoch=4), now=0.0)
    wish = CommandBatch(router_id="q", router_epoch=4, first_number=1, demand=(TierDemand(0, 3),))
    assert sessions.apply(wish, now=0.0).reply.credits.tiers[0].num_outputs == 0
    assert [d.subscription for d in publish(sessions, token(1, 10)).deliveries] == [100]
    finished = publish(sessions, token(1, 11, FinishReason.STOP))
    frames = {delivery.subscription: delivery.frames for delivery in finished.deliveries}
    granted = msgspec.msgpack.decode(frames[200][0], type=StepOutputs)
    assert (granted.deltas, granted.credits.tiers[0].num_outputs) == ([], 1)
    assert 200 not in [d.subscription for d in publish(sessions, token(2, 10)).deliveries]


def test_a_router_hears_of_more_free_seats_than_it_was_told_of(sessions: Sessions) -> None:
    sessions.apply(make_batch(*(submit(number) for number in range(1, 9))), now=0.0)
    sessions.subscribe(200, Subscribe(router_id="q", router_epoch=4), now=0.0)

    def hearers(*deltas: TokenDelta) -> list[int]:
        return [delivery.subscription for delivery in publish(sessions, *deltas).deliveries]

    assert hearers(token(1, 10, FinishReason.STOP)) == [100, 200]
    sessions.apply(make_batch(submit(9), first=9), now=0.0)
    assert hearers(token(2, 10, FinishReason.STOP)) == [100]
    assert hearers(token(3, 10, FinishReason.STOP)) == [100, 200]
    assert hearers() == []


# Epochs and leases


def test_a_higher_epoch_ends_the_lower_one(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    applied = sessions.apply(make_batch(submit(1), epoch=2), now=0.0)
    assert applied.effects == Effects(commands=[end(1), add(1, owner="r:2")], deliveries=[ended(100)])
    assert deltas_of(publish(sessions, token(1, 10))) == []


def test_a_higher_epoch_may_come_with_its_subscription(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    effects = sessions.subscribe(101, make_subscribe(epoch=2), now=0.0)
    assert effects == Effects(commands=[end(1)], deliveries=[ended(100)])


def test_batches_and_subscriptions_of_an_ended_epoch_are_refused(sessions: Sessions) -> None:
    sessions.apply(make_batch(epoch=2), now=0.0)
    applied = sessions.apply(make_batch(submit(1)), now=0.0)
    assert applied.effects == Effects()
    assert applied.reply.ended
    assert sessions.subscribe(101, make_subscribe(number=2), now=0.0) == Effects(deliveries=[ended(101)])


def test_a_subscription_that_speaks_of_unknown_frames_ends_the_epoch(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    effects = sessions.subscribe(101, make_subscribe(number=2, received=1), now=0.0)
    assert effects == Effects(commands=[end(1)], deliveries=[ended(100), ended(101)])
    assert sessions.apply(make_batch(first=2), now=0.0).reply.ended


def test_a_silent_router_loses_its_subscription_then_its_work(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=10.0)
    assert sessions.expire(now=10.0 + LEASE_S) == Effects()
    assert sessions.expire(now=10.1 + LEASE_S) == Effects(deliveries=[ended(100)])
    assert sessions.expire(now=10.0 + LEASE_S + LEASE_GRACE_S) == Effects()
    assert sessions.expire(now=10.1 + LEASE_S + LEASE_GRACE_S) == Effects(commands=[end(1)])
    assert sessions.apply(make_batch(first=2), now=20.0).reply.ended


def test_a_router_that_comes_back_within_the_grace_loses_nothing(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    sessions.expire(now=LEASE_S + 0.1)
    publish(sessions, token(1, 10), now=LEASE_S + 0.2)
    effects = sessions.subscribe(101, make_subscribe(number=2), now=LEASE_S + 1.0)
    assert deltas_of(effects) == [(101, [token(1, 10)])]
    assert sessions.expire(now=LEASE_S + LEASE_GRACE_S + 0.1) == Effects()


def test_pings_alone_keep_the_work_of_a_router(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    for now in range(1, 100):
        assert sessions.apply(make_batch(first=2), now=float(now)).effects == Effects()
        assert sessions.expire(now=float(now)) == Effects()


def test_a_last_frame_that_was_lost_is_sent_again_on_a_new_subscription(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    publish(sessions, token(1, 10), now=1.0)
    sessions.apply(make_batch(first=2), now=1.0 + REOPEN_S)
    assert sessions.expire(now=1.0 + REOPEN_S) == Effects()
    assert sessions.expire(now=1.1 + REOPEN_S) == Effects(deliveries=[ended(100)])
    effects = sessions.subscribe(101, make_subscribe(number=2), now=1.2 + REOPEN_S)
    assert deltas_of(effects) == [(101, [token(1, 10)])]


def test_a_router_that_pings_but_acknowledges_nothing_is_ended(sessions: Sessions) -> None:
    sessions.apply(make_batch(submit(1)), now=0.0)
    publish(sessions, token(1, 10), now=1.0)
    sessions.apply(make_batch(first=2), now=1.0 + REOPEN_S)
    assert sessions.expire(now=1.1 + REOPEN_S) == Effects(deliveries=[ended(100)])
    sessions.subscribe(101, make_subscribe(number=2), now=8.0)
    sessions.apply(make_batch(first=2), now=8.0 + MAX_UNACKED_S)
    assert sessions.expire(now=8.0 + MAX_UNACKED_S) == Effects()
    assert sessions.expire(now=8.1 + MAX_UNACKED_S) == Effects(commands=[end(1)], deliveries=[ended(101)])
