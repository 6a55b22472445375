from replicas.sequence import Sequence
from replicas.waiting import WaitingQueue, effective_tier
from tests.replicas.fake_runner import request


def sequence(seq_id: int, tier: int, waited_s: float = 0.0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        owner="",
        request=request(seq_id, 3, tier=tier),
        index=0,
        arrival_at=0.0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        stop_ids=frozenset(),
        max_num_tokens=9,
        waited_s=waited_s,
    )


def drain(queue: WaitingQueue, now: float) -> list[int]:
    order = []
    while (head := queue.next(now, set())) is not None:
        queue.remove(head, now)
        order.append(head.seq_id)
    return order


def test_tiers_first_then_dispatch_order() -> None:
    queue = WaitingQueue(aging_s=10.0)
    for seq_id, tier in ((1, 2), (2, 0), (3, 1), (4, 0)):
        queue.add(sequence(seq_id, tier), 0.0)
    assert drain(queue, 0.0) == [2, 4, 3, 1]


def test_age_lifts_by_one_tier_per_interval_and_ties_go_to_the_earlier() -> None:
    queue = WaitingQueue(aging_s=10.0)
    queue.add(sequence(1, 2), 0.0)
    queue.add(sequence(2, 1), 15.0)
    queue.add(sequence(3, 0), 15.0)
    assert drain(queue, 19.0) == [3, 1, 2]
    queue.add(sequence(1, 2, waited_s=20.0), 0.0)
    queue.add(sequence(3, 0), 0.0)
    assert drain(queue, 0.0) == [1, 3]


def test_preempted_ones_go_first_within_their_tier_in_their_old_order() -> None:
    queue = WaitingQueue(aging_s=10.0)
    queue.add(sequence(5, 1), 0.0)
    queue.put_back(sequence(3, 1), 0.0)
    queue.put_back(sequence(2, 1), 0.0)
    queue.put_back(sequence(4, 1), 0.0)
    queue.add(sequence(6, 0), 0.0)
    assert [s.seq_id for s in queue] == [2, 3, 4, 5, 6]
    assert drain(queue, 0.0) == [6, 2, 3, 4, 5]


def test_waiting_time_adds_up_over_several_waits_and_running_does_not_count() -> None:
    queue = WaitingQueue(aging_s=10.0)
    seq = sequence(1, 3)
    queue.add(seq, 0.0)
    queue.remove(seq, 8.0)
    queue.put_back(seq, 100.0)
    assert effective_tier(seq, 101.0, 10.0) == 3
    assert effective_tier(seq, 102.0, 10.0) == 2


def test_removal_keeps_the_token_count() -> None:
    queue = WaitingQueue(aging_s=10.0)
    first, second = sequence(1, 0), sequence(2, 0)
    queue.add(first, 0.0)
    queue.add(second, 0.0)
    assert queue.tiers[0].num_tokens == 6
    queue.remove(first, 0.0)
    assert (queue.tiers[0].num_tokens, len(queue)) == (3, 1)
    queue.remove(second, 0.0)
    assert queue.tiers == {}
