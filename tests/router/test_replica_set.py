import asyncio
import threading

from router.replica_set import ReplicaSet, replica_set


async def test_a_watcher_gets_the_present_set_and_every_later_one() -> None:
    replicas = ReplicaSet()
    seen: asyncio.Queue[frozenset[str]] = asyncio.Queue()
    replicas.publish(frozenset("a"))
    replicas.watch(seen.put_nowait)
    assert await seen.get() == {"a"}
    thread = threading.Thread(target=replicas.publish, args=(frozenset("ab"),))
    thread.start()
    assert await seen.get() == {"a", "b"}
    thread.join()


async def test_an_equal_set_is_no_change() -> None:
    replicas = ReplicaSet()
    seen: list[frozenset[str]] = []
    replicas.watch(seen.append)
    for names in ("a", "a", "b"):
        replicas.publish(frozenset(names))
    await asyncio.sleep(0)
    assert seen == [frozenset(), {"a"}, {"b"}]


def test_a_watcher_whose_loop_has_closed_is_forgotten() -> None:
    replicas = ReplicaSet()
    seen: list[frozenset[str]] = []

    async def watch() -> None:
        replicas.watch(seen.append)
        await asyncio.sleep(0)

    asyncio.run(watch())
    replicas.publish(frozenset("a"))
    assert seen == [frozenset()]


def test_a_held_replica_stays_reachable_until_its_last_release() -> None:
    replicas = ReplicaSet()
    replicas.publish(frozenset("a"))
    replicas.hold("a")
    replicas.hold("a")
    replicas.publish(frozenset())
    replicas.release("a")
    assert replicas.reachable("a")
    assert replicas.held == {"a"}
    replicas.release("a")
    assert not replicas.reachable("a")
    assert replicas.held == frozenset()


def test_a_candidate_is_reachable_without_a_hold() -> None:
    replicas = ReplicaSet()
    replicas.publish(frozenset("a"))
    assert replicas.reachable("a")
    assert not replicas.reachable("b")


def test_there_is_one_set_per_process() -> None:
    assert replica_set() is replica_set()


def test_only_the_last_release_of_a_drained_replica_is_told() -> None:
    replicas = ReplicaSet()
    told: list[str] = []
    replicas.when_released(lambda: told.append("released"))
    replicas.publish(frozenset("ab"))
    for name in ("a", "b", "b"):
        replicas.hold(name)
    replicas.release("a")  # still a candidate
    replicas.publish(frozenset("a"))
    replicas.release("b")
    assert told == []
    replicas.release("b")
    assert told == ["released"]
