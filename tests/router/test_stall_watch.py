import asyncio

import pytest

from router.stall_watch import StallWatch
from tests.router.test_backend import in_virtual_time

LIMIT_S = 10.0


async def wait(watch: StallWatch, seconds: float) -> bool:
    """Wait under the watch; returns whether it ended that."""
    watch.begin()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if not watch.has_cancelled():
            raise
        return True
    finally:
        watch.end()
    return False


@pytest.mark.parametrize("idle_s", [0.0, 1.0, 2.4])
@in_virtual_time
async def test_a_wait_is_ended_within_a_quarter_after_its_limit(idle_s: float) -> None:
    watch = StallWatch(LIMIT_S)
    assert not await wait(watch, 0.1)
    await asyncio.sleep(idle_s)
    began_at = asyncio.get_running_loop().time()
    assert await wait(watch, 100.0)
    assert LIMIT_S <= asyncio.get_running_loop().time() - began_at <= 1.25 * LIMIT_S
    await asyncio.sleep(100.0)  # the task goes on


@in_virtual_time
async def test_short_waits_are_not_ended_however_many_and_nor_is_what_lies_between() -> None:
    watch = StallWatch(LIMIT_S)
    for seconds in (9.9, 0.0, 5.0, 9.9):
        assert not await wait(watch, seconds)
        await asyncio.sleep(seconds)
    await asyncio.sleep(100.0)


@in_virtual_time
async def test_whoever_else_cancels_the_task_is_obeyed() -> None:
    watch = StallWatch(LIMIT_S)
    task = asyncio.create_task(wait(watch, 100.0))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    watch.close()


@in_virtual_time
async def test_a_closed_watch_begins_anew() -> None:
    watch = StallWatch(LIMIT_S)
    assert not await wait(watch, 0.1)
    watch.close()
    await asyncio.sleep(100.0)
    assert await wait(watch, 100.0)
