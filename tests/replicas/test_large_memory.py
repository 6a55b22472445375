import numpy as np

from replicas.large_memory import large_zeros


def test_memory_is_zeroed_shaped_and_writable() -> None:
    array = large_zeros((3, 5, 7), np.float32)
    assert array.shape == (3, 5, 7)
    assert array.dtype == np.float32
    assert not array.any()
    array[1] = 2.0
    assert array.sum() == 70


def test_nothing_is_an_array_too() -> None:
    assert large_zeros((0, 4), np.int8).shape == (0, 4)
