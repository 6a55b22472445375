import numpy as np
import torch

from replicas.attention.staging import Staging, num_bytes

CPU = torch.device("cpu")


def test_arrays_arrive_with_type_and_shape() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
        np.array([0.25, 0.5]),
        np.zeros((0, 4), dtype=np.int32),
    ]
    for array, tensor in zip(arrays, Staging(CPU).upload(arrays), strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.shape == array.shape


def test_uploads_do_not_overwrite_each_other() -> None:
    staging = Staging(CPU)
    uploaded = [staging.upload([np.full(100 * i, i, dtype=np.int64)])[0] for i in range(1, 50)]
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(uploaded, start=1))


def test_a_fixed_place_gives_the_same_addresses() -> None:
    staging = Staging(CPU)
    arrays = [np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int64)]
    into = torch.zeros(num_bytes(arrays), dtype=torch.uint8)
    first = staging.upload(arrays, into)
    second = staging.upload([array + 1 for array in arrays], into)
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]
    assert first[1].tolist() == [1, 2, 3, 4]
