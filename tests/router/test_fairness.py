from random import Random

import pytest

from router import fairness
from router.fairness import FairQueue, service


def make_queue(**num_requests: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    key = 0
    for tenant, count in num_requests.items():
        for i in range(count):
            queue.push(tenant, key, f"{tenant}{i}")
            key += 1
    return queue


def serve(queue: FairQueue[str], cost: float = 1.0, weight: float = 1.0) -> str | None:
    head = queue.head()
    if head is None:
        return None
    queue.remove(head.tenant, head.key)
    queue.charge(head.tenant, cost, weight)
    return head.item


def test_the_tenant_with_the_least_service_is_next() -> None:
    queue = make_queue(a=3, b=3)
    queue.charge("a", 2.5)
    assert [serve(queue) for _ in range(6)] == ["b0", "b1", "b2", "a0", "a1", "a2"]


def test_equals_are_served_in_order_of_arrival() -> None:
    assert [serve(make_queue(b=1, a=1)) for _ in range(2)] == ["b0", "b0"]
    queue = make_queue(a=2, b=2)
    assert [serve(queue) for _ in range(4)] == ["a0", "b0", "a1", "b1"]


def test_a_weight_of_two_gets_twice_the_service() -> None:
    queue = make_queue(a=40, b=40)
    served = []
    for _ in range(30):
        head = queue.head()
        assert head is not None
        weight = 2.0 if head.tenant == "a" else 1.0
        served.append(serve(queue, 10.0, weight))
    assert sum(item is not None and item.startswith("a") for item in served) == 20


def test_a_newcomer_starts_level_with_the_least_served() -> None:
    queue = make_queue(a=3, b=3)
    queue.charge("a", 100)
    queue.charge("b", 40)
    queue.push("c", 99, "c0")
    assert queue.counter("c") == 40


def test_time_away_is_no_credit() -> None:
    queue = make_queue(a=1)
    queue.charge("a", 70)
    serve(queue, 0)
    queue.push("b", 99, "b0")
    assert queue.counter("b") == 70


def test_going_away_forgives_no_debt() -> None:
    queue = make_queue(a=1, b=5)
    queue.charge("a", 70)
    queue.remove("a", 0)
    queue.push("a", 50, "a1")
    assert queue.counter("a") == 70


def test_a_refund_brings_a_tenant_forward() -> None:
    queue = make_queue(a=2, b=2)
    queue.charge("a", 10)
    assert serve(queue) == "b0"
    queue.charge("a", -10)
    assert serve(queue) == "a0"
    queue.charge("a", -1000)
    assert queue.counter("a") == 0


def test_excluded_tenants_are_passed_by_and_keep_their_place() -> None:
    queue = make_queue(a=1, b=1)
    passed = queue.head({"a"})
    assert passed is not None
    assert passed.item == "b0"
    assert queue.head({"a", "b"}) is None
    assert [serve(queue), serve(queue), serve(queue)] == ["a0", "b0", None]


def test_a_request_taken_out_is_not_served() -> None:
    queue = make_queue(a=2)
    assert queue.remove("a", 0) == "a0"
    assert queue.remove("a", 0) is None
    assert queue.remove("nobody", 0) is None
    assert (len(queue), list(queue)) == (1, ["a1"])
    assert serve(queue) == "a1"


def test_the_number_of_counters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_IDLE_TENANTS", 10)
    queue: FairQueue[str] = FairQueue()
    queue.push("heavy", 0, "x")
    serve(queue, 1e6)
    for i in range(1, 1000):
        queue.push(f"t{i}", i, "x")
        serve(queue)
    assert len(queue._counters) <= 11
    assert queue.counter("heavy") == 1e6, "the largest debts are kept longest"


def test_the_heap_does_not_grow_with_changes() -> None:
    queue = make_queue(a=1, b=1)
    for i in range(1000):
        queue.charge("a", -1)
        queue.push("c", 10 + i, "x")
        queue.remove("c", 10 + i)
    assert len(queue._heap) <= 2 * 3 + 65


def test_heads_agree_with_a_plain_search_whatever_happens() -> None:
    draw = Random(3)
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, str] = {}
    for step in range(20_000):
        action = draw.random()
        if action < 0.45:
            tenant = f"t{draw.randrange(8)}"
            queue.push(tenant, step, step)
            waiting[step] = tenant
        elif action < 0.6 and waiting:
            key = draw.choice(list(waiting))
            queue.remove(waiting.pop(key), key)
        elif action < 0.7:
            queue.charge(f"t{draw.randrange(8)}", draw.randint(-20, 30))
        else:
            excluded = {f"t{draw.randrange(8)}"}
            oldest: dict[str, int] = {}
            for key, tenant in waiting.items():
                oldest.setdefault(tenant, key)
            wanted = min(
                ((queue.counter(t), key) for t, key in oldest.items() if t not in excluded), default=None
            )
            head = queue.head(excluded)
            assert (head and (queue.counter(head.tenant), head.key)) == wanted
            if head is not None:
                queue.remove(head.tenant, head.key)
                queue.charge(head.tenant, 5)
                del waiting[head.key]


def test_output_costs_twice_what_input_does() -> None:
    assert service(10, 5) == 20


def test_before_a_new_request_go_its_own_and_as_many_of_each_other_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for key in range(9):
        queue.push("flood", key, "x")
    assert [queue.num_before(tenant) for tenant in ("new", "flood")] == [1, 9]
    for key in range(9, 12):
        queue.push("other", key, "x")
    assert [queue.num_before(tenant) for tenant in ("new", "other", "flood")] == [2, 7, 12]


def test_before_a_new_request_a_tenant_of_twice_the_weight_gets_twice_as_many() -> None:
    queue: FairQueue[str] = FairQueue()
    for key in range(9):
        queue.push("heavy", key, "x", weight=2.0)
    assert [queue.num_before("new", weight) for weight in (1.0, 2.0, 4.0)] == [2, 1, 0]
    queue.push("new", 9, "x", weight=1.0)
    assert [queue.num_before("new"), queue.num_before("heavy", 2.0)] == [5, 10]
    for key in range(9):
        queue.remove("heavy", key)
    assert queue.num_before("another") == 1
