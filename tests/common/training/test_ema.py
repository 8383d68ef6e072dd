import keras
import numpy as np
import pytest
import tensorflow as tf

from common.layers import moving_statistics
from common.training.optimizers import AveragedWeights
from tests.common.thread_ranks import together


def make_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )


def values(model):
    return [weight.numpy() for weight in model.weights]


def train_a_step(model, optimizer, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(batch, training=True) - 1.0) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("decay", [0.5, 0.9998])
def test_equals_the_recurrence_in_numpy(compiled, decay):
    model = make_model()
    optimizer = keras.optimizers.SGD(0.3)
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, decay)

    def step(batch):
        train_a_step(model, optimizer, batch)
        averaged.update()

    if compiled:
        step = tf.function(step)
    expected = [w.astype(np.float64) for w in values(model)]
    for n in range(12):
        step(tf.random.normal((8, 4), seed=n))
        d = min(decay, (1 + n) / (10 + n))
        expected = [d * a + (1 - d) * w for a, w in zip(expected, values(model), strict=True)]
    with averaged.swapped_in():
        for got, want, weight in zip(values(model), expected, model.weights, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=weight.path)
    moved = [np.abs(a - w).max() for a, w in zip(expected, values(model), strict=True)]
    assert min(moved) > 1e-4  # the batch norm statistics are averaged too


def test_the_first_average_is_one_part_in_ten_of_the_old():
    """(1 + 0) / (10 + 0) whatever the decay, as tf.train.ExponentialMovingAverage with num_updates=0."""
    model = make_model()
    averaged = AveragedWeights(model, 0.9998)
    before = model.weights[0].numpy()
    model.weights[0].assign(before + 1.0)
    averaged.update()
    with averaged.swapped_in():
        np.testing.assert_allclose(model.weights[0].numpy(), before + 0.9, rtol=1e-6)


def test_swapping_gives_the_weights_back_bit_for_bit_even_after_an_error():
    model = make_model()
    averaged = AveragedWeights(model, 0.9)
    for weight in model.weights:
        weight.assign(weight + 1e-3 * tf.random.normal(weight.shape))
    own = values(model)
    with pytest.raises(RuntimeError, match="evaluation"), averaged.swapped_in():
        assert any((a != b).any() for a, b in zip(values(model), own, strict=True))
        raise RuntimeError("evaluation failed")
    for after, before in zip(values(model), own, strict=True):
        np.testing.assert_array_equal(after, before)


def test_saved_and_restored_by_a_checkpoint(tmp_path):
    model = make_model()
    averaged = AveragedWeights(model, 0.9)
    for n in range(5):
        for weight in model.weights:
            weight.assign(weight + 0.1)
        averaged.update()
        if n == 3:
            path = tf.train.Checkpoint(model=model, averaged=averaged).save(tmp_path / "ckpt")
    other_model = make_model(seed=1)
    other = AveragedWeights(other_model, 0.9)
    tf.train.Checkpoint(model=other_model, averaged=other).restore(path).assert_existing_objects_matched()
    for weight in other_model.weights:
        weight.assign(weight + 0.1)
    other.update()  # with the fifth update's decay: the count came back too
    with averaged.swapped_in(), other.swapped_in():
        for mine, theirs in zip(values(model), values(other_model), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_decay_zero_is_off():
    model = make_model()
    averaged = AveragedWeights(model, 0.0)
    before = values(model)
    averaged.update()
    model.weights[0].assign(model.weights[0] * 2)
    with averaged.swapped_in():
        np.testing.assert_array_equal(model.weights[0].numpy(), before[0] * 2)


def test_mixed_precision_averages_the_float32_weights():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    averaged = AveragedWeights(model, 0.5)
    start = model.weights[0].numpy()
    model.weights[0].assign(start + 1e-5)  # lost in float16
    averaged.update()
    with averaged.swapped_in():
        np.testing.assert_allclose(model.weights[0].numpy() - start, 0.9e-5, atol=2e-7)


def test_its_variables_are_the_averages_and_their_count():
    model = make_model()
    assert len(AveragedWeights(model, 0.9).variables) == len(model.weights) + 1


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_statistics_are_averaged_over_the_ranks_while_swapped_in(decay):
    """NumPy's mean of what the ranks have; the rest is its average; after it nothing has changed."""

    def work(ranks):
        model = make_model()
        for number in (0, 50):
            for index, weight in enumerate(model.weights):
                of_rank = 100 * ranks.rank if "moving" in weight.path else 0  # all else is the same on all
                random = np.random.default_rng(number + index + of_rank)
                weight.assign(random.uniform(0.5, 2.0, weight.shape))
            if number == 0:
                averaged = AveragedWeights(model, decay)
        averaged.update()
        own = values(model)
        own_averages = [
            variable.numpy() for variable in averaged.averages_of([w.value for w in model.weights])
        ]
        with pytest.raises(RuntimeError, match="evaluation"), averaged.swapped_in(ranks):
            inside = values(model)
            raise RuntimeError("evaluation failed")
        for after, before in zip(values(model), own, strict=True):
            np.testing.assert_array_equal(after, before)
        paths = [weight.path for weight in model.weights]
        return paths, own_averages or own, inside

    (paths, first, inside), (_, second, inside_second) = together(2, work)
    for path, a, b, got, got_second in zip(paths, first, second, inside, inside_second, strict=True):
        np.testing.assert_array_equal(got, got_second)
        np.testing.assert_allclose(got, (a.astype(np.float64) + b) / 2, rtol=1e-6, err_msg=path)
        assert np.array_equal(a, b) != ("moving" in path)


def test_averages_of_come_in_the_order_asked_for():
    model = make_model()
    averaged = AveragedWeights(model, 0.9)
    for index, weight in enumerate(model.weights):
        weight.assign(tf.fill(weight.shape, float(index)))
    averaged.update()
    mean, variance = moving_statistics(model)
    swapped = averaged.averages_of([variance, mean])
    straight = averaged.averages_of([mean, variance])
    assert [id(v) for v in swapped] == [id(v) for v in reversed(straight)]
    weights = [weight.value for weight in model.weights]
    np.testing.assert_allclose(swapped[1], 0.9 * next(i for i, w in enumerate(weights) if w is mean))
    assert AveragedWeights(model, 0.0).averages_of([mean]) == []
