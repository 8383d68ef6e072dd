import numpy as np
import tensorflow as tf

from common.tf_random import Random


def draws(seed: list[int]) -> list[np.ndarray]:
    random = Random(tf.constant(seed))
    drawn = [random.uniform(-1.0, 3.0, (500,)), random.uniform(-1.0, 3.0, (500,)), random.permutation(50)]
    return [tensor.numpy() for tensor in drawn]


def test_every_call_gives_new_numbers_and_the_seed_decides_them():
    first, again, other = draws([1, 2]), draws([1, 2]), draws([2, 1])
    for one, same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one, same)
        assert (one != different).any()
    assert (first[0] != first[1]).all()


def test_the_global_seed_has_no_say():
    tf.random.set_seed(1)
    one = draws([1, 2])
    tf.random.set_seed(2)
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(draws([1, 2])))


def test_what_the_numbers_are():
    numbers, _, order = draws([3, 4])
    assert numbers.dtype == np.float32 and order.dtype == np.int32
    assert numbers.min() >= -1 and numbers.max() < 3
    assert np.histogram(numbers, 4, (-1, 3))[0].min() > 90
    assert sorted(order) == list(range(50)) and (order != np.arange(50)).any()
