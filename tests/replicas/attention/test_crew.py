import threading

import pytest

from replicas.attention.crew import Crew


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 9])
def test_shares_cover_all_work_once_and_differ_by_one_item(num_threads: int, count: int) -> None:
    shares: list[tuple[int, int]] = []
    Crew(num_threads).run(lambda *args: shares.append(args[-2:]), ("unused",), count)
    assert len(shares) == num_threads
    assert sorted(i for first, last in shares for i in range(first, last)) == list(range(count))
    sizes = [last - first for first, last in shares]
    assert max(sizes) - min(sizes) <= 1


def test_the_caller_works_beside_the_others() -> None:
    barrier = threading.Barrier(2, timeout=30)
    threads: list[int] = []

    def kernel(_first: int, _last: int) -> None:
        barrier.wait()  # passes only if both shares run at the same time
        threads.append(threading.get_ident())

    Crew(2).run(kernel, (), 2)
    assert threading.get_ident() in threads
    assert len(set(threads)) == 2


def test_an_error_of_another_thread_reaches_the_caller() -> None:
    def kernel(first: int, _last: int) -> None:
        if first > 0:
            raise ValueError("in a share")

    with pytest.raises(ValueError, match="in a share"):
        Crew(2).run(kernel, (), 2)
