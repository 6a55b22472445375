import asyncio

import pytest

from cluster.simulation.virtual_time import VirtualTimeLoop, run


def test_time_goes_on_to_the_next_timer_and_nowhere_else() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = []
        for seconds in (1.5, 0.0, 100.0):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    assert run(main()) == [1.5, 1.5, 101.5]


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_later(1.0, order.append, number)
        await asyncio.sleep(1.0)
        return order

    assert run(main()) == list(range(20))


def test_what_was_cancelled_neither_runs_nor_moves_the_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, pytest.fail, "it was cancelled").cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(60.0)
        await asyncio.sleep(100.0)
        return loop.time()

    assert run(main()) == 101.0


def test_waiting_for_nothing_is_an_error_and_so_is_waiting_too_long() -> None:
    async def for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlock"):
        run(for_nothing())
    with pytest.raises(RuntimeError, match="still waiting after 10"):
        run(asyncio.sleep(11.0), limit_s=10.0)


def test_it_counts_its_rounds() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        before = loop.num_turns
        for _ in range(5):
            await asyncio.sleep(1.0)
        return loop.num_turns - before

    assert run(main()) >= 5
