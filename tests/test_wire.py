"""Both ends of the wire contract against a carrier that loses, repeats, reorders and delays."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas import frames
from replicas.api import LEASE_GRACE_S, LEASE_S, FinishReason
from router.streams import MAX_LOST_BATCHES
from tests.wire_world import Router, Subscription, World, make_request

Action = Callable[[World, Router, Random], None]


def submit(world: World, router: Router, draw: Random) -> None:
    request = make_request(
        next(world.keys),
        attempt=draw.randrange(3),
        n=draw.choice([1, 1, 2, 3]),
        max_tokens=draw.randint(1, 20),
        logprobs=draw.choice([None, 0]),
    )
    router.submit(request)


def abort(world: World, router: Router, draw: Random) -> None:
    del world
    outputs = router.open_outputs()
    if outputs:
        router.abort(draw.choice(outputs).request.request_id)


def abort_output(world: World, router: Router, draw: Random) -> None:
    del world
    outputs = router.open_outputs()
    if outputs:
        output = draw.choice(outputs)
        router.abort(output.request.request_id, output.index)


def withdraw(world: World, router: Router, draw: Random) -> None:
    del world
    outputs = router.open_outputs()
    if outputs:
        router.withdraw(draw.choice(outputs).request.request_id)


def send(world: World, router: Router, draw: Random) -> None:
    del draw
    world.send(router)


def deliver_batch(world: World, router: Router, draw: Random) -> None:
    if router.calls:
        call = draw.choice(router.calls)  # again, if it was delivered already
        call.reply = world.apply(call.batch)


def deliver_reply(world: World, router: Router, draw: Random) -> None:
    answered = [call for call in router.calls if call.reply is not None]
    if answered:
        world.finish_call(router, draw.choice(answered))


def lose_call(world: World, router: Router, draw: Random) -> None:
    if router.calls:
        call = draw.choice(router.calls)
        world.late_batches.append(call.batch)
        call.reply = None
        world.finish_call(router, call)


def lose_call_seldom(world: World, router: Router, draw: Random) -> None:
    if router.num_lost < MAX_LOST_BATCHES - 1:
        router.num_lost += bool(router.calls)
        lose_call(world, router, draw)


def deliver_late_batch(world: World, router: Router, draw: Random) -> None:
    del router
    if world.late_batches:
        world.apply(draw.choice(world.late_batches))


def open_subscription(world: World, router: Router, draw: Random) -> None:
    del draw
    if router.subscription.key is None:
        world.open_subscription(router.subscription)


def open_late_subscription(world: World, router: Router, draw: Random) -> None:
    del router
    if world.late_subscriptions:
        world.open_subscription(Subscription(draw.choice(world.late_subscriptions)))


def receive(world: World, router: Router, draw: Random) -> None:
    del draw
    world.receive(router)


def receive_out_of_order(world: World, router: Router, draw: Random) -> None:
    waiting = len(router.subscription.frames)
    world.receive(router, draw.randrange(waiting) if waiting else 0)


def lose_frame(world: World, router: Router, draw: Random) -> None:
    del world
    waiting = router.subscription.frames
    if waiting:
        del waiting[draw.randrange(len(waiting))]


def repeat_frame(world: World, router: Router, draw: Random) -> None:
    del world
    waiting = router.subscription.frames
    if waiting:
        waiting.append(draw.choice(waiting))


def break_subscription(world: World, router: Router, draw: Random) -> None:
    del draw
    world.reopen(router)


def step(world: World, router: Router, draw: Random) -> None:
    del router, draw
    world.step()


def pass_time(world: World, router: Router, draw: Random) -> None:
    del router
    world.advance(draw.uniform(0, 0.3))


def stand_still(world: World, router: Router, draw: Random) -> None:
    del router
    world.advance(draw.uniform(LEASE_S, LEASE_S + 1.2 * LEASE_GRACE_S))


def restart_router(world: World, router: Router, draw: Random) -> None:
    del draw
    world.restart_router(router)


def restart_replica(world: World, router: Router, draw: Random) -> None:
    del router, draw
    world.restart_replica()


WORK: dict[Action, float] = {
    submit: 2,
    withdraw: 0.5,
    abort: 0.3,
    abort_output: 0.5,
    send: 3,
    deliver_batch: 4,
    deliver_reply: 4,
    open_subscription: 2,
    receive: 8,
    step: 6,
    pass_time: 2,
}
FAULTS: dict[Action, float] = {
    lose_call: 1,
    deliver_late_batch: 1,
    open_late_subscription: 0.5,
    receive_out_of_order: 1,
    lose_frame: 0.5,
    repeat_frame: 1,
    break_subscription: 1,
    stand_still: 0.2,
    restart_router: 0.1,
    restart_replica: 0.1,
}


@given(seed=st.integers(0, 2**32 - 1), fault_rate=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
@settings(max_examples=200, deadline=None)
def check_any_faults(seed: int, fault_rate: float) -> None:
    draw = Random(seed)
    world = World(num_routers=2)
    weights = WORK | {fault: rate * fault_rate for fault, rate in FAULTS.items()}
    for action in draw.choices(list(weights), list(weights.values()), k=400):
        action(world, draw.choice(world.routers), draw)
        assert len(world.engine.requests) == world.sessions.num_open_requests
    world.settle()
    outputs = [output for router in world.routers for output in router.outputs.values()]
    assert all(output.is_aborted or output.finish_reason is not None for output in outputs)
    if not fault_rate:
        assert not any(output.finish_reason is FinishReason.ERROR for output in outputs)
    world.advance(LEASE_S + LEASE_GRACE_S + 0.1)  # for what dead routers and late batches left behind
    assert not world.engine.requests


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_faults_that_pass_fail_no_stream(seed: int) -> None:
    draw = Random(seed)
    world = World(num_routers=2)
    passing = dict.fromkeys(FAULTS.keys() - {stand_still, restart_router, restart_replica, lose_call}, 0.5)
    weights = WORK | passing | {lose_call_seldom: 1.0}
    for action in draw.choices(list(weights), list(weights.values()), k=400):
        action(world, draw.choice(world.routers), draw)
    world.settle()
    assert not any(router.num_failed_epochs for router in world.routers)


def test_any_faults_with_the_real_limits() -> None:
    check_any_faults()


def test_any_faults_with_coalescing_and_splitting_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_UNACKED_FRAMES", 3)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 120)
    check_any_faults()
