import keras
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.errors import UserError
from common.layers import BatchNormalization
from common.training import step_guard
from common.training.ema import AveragedWeights
from tests.common.training.small_model import assert_same


class Pair(Ranks):
    """Rank 0 of two. Rank 1 has the images 77 and 78."""

    world_size = 2

    def __init__(self, other_is_finite):
        self.other = [[other_is_finite, [77, 78]]]

    def gather(self, value):
        return [value, self.other]


class Training:
    """Trains a small network with guarded steps."""

    def __init__(self, *, loss_scale=None, every_gradient=True, accumulate_steps=None):
        keras.utils.set_random_seed(3)
        self.ranks = Ranks()
        layers = [keras.layers.Conv2D(4, 3, use_bias=False), BatchNormalization(name="bn")]
        layers = [keras.Input((8, 8, 3)), *layers, keras.layers.Conv2D(1, 6)]
        self.model = keras.Sequential(layers, name="small")
        self.optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate_steps)
        if loss_scale:
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer, initial_scale=loss_scale)
        self.optimizer.build(self.model.trainable_variables)
        self.averaged = AveragedWeights(self.model, 0.9)
        trained = [*self.model.trainable_variables, *self.optimizer.variables]
        updated = [*(v.value for v in trained), *self.averaged.variables]
        parts = self.ranks, self.gradients_of, self.update, self.model
        options = {"updated": updated, "xla": True, "every_gradient": every_gradient}
        self.step = step_guard.guarded_step(*parts, **options)

    def gradients_of(self, images, targets):
        with tf.GradientTape() as tape:
            outputs = self.model(images, training=True)[:, 0, 0, 0]
            loss = tf.reduce_mean(tf.square(outputs - targets["goal"]))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        broken = targets["breaks_gradient"][0]
        return [g + broken for g in gradients], {"loss": loss, "twice": 2 * loss}

    def update(self, gradients):
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.averaged.update()

    def everything(self):
        parts = [*self.model.variables, *self.optimizer.variables]
        return [np.array(v.value) for v in parts] + [v.numpy() for v in self.averaged.variables]


def batch(*, goal=1.0, image=0.5, gradient=0.0, size=4):
    random = np.random.default_rng(0)
    images = tf.constant(random.random((size, 8, 8, 3), np.float32) * image)
    targets = {
        "goal": tf.fill([size], tf.constant(goal, tf.float32)),
        "breaks_gradient": tf.fill([size], tf.constant(gradient, tf.float32)),
        "image_ids": tf.range(10, 10 + size, dtype=tf.int64),
    }
    return images, targets


GO_ON = tf.constant(0.0)


@pytest.fixture
def alone():
    training = Training()
    return training, step_guard.StepGuard(training.ranks, limit=2)


@pytest.fixture(params=[True, False], ids=["with a branch", "without, as on a GPU"])
def branch(request, monkeypatch):
    monkeypatch.setattr(step_guard, "is_cpu_only", lambda: request.param)


BAD_STEPS = [
    ({"goal": np.nan}, None),
    ({"image": np.inf}, 2),
    ({"gradient": np.nan}, None),
    ({"gradient": np.inf}, 2),
    ({"gradient": 1e25}, None),  # the gradient's norm overflows
]


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize(("bad", "accumulate_steps"), BAD_STEPS)
def test_step_that_is_not_finite_changes_no_variable(bad, accumulate_steps):
    training = Training(accumulate_steps=accumulate_steps)
    for _ in range(3):
        assert training.step(*batch(), GO_ON).finite
    before = training.everything()
    result = training.step(*batch(**bad), GO_ON)
    assert not result.finite
    assert all(float(value) == 0.0 for value in result.values.values())  # so the sums of an epoch stay finite
    after = training.everything()
    assert_same(before, after)
    assert training.step(*batch(), GO_ON).finite
    changed = [not np.array_equal(a, b) for a, b in zip(after, training.everything(), strict=True)]
    assert sum(changed) > len(changed) // 2


@pytest.mark.usefixtures("branch")
def test_finite_guarded_step_equals_a_plain_step():
    training, plain = Training(), Training()
    for _ in range(4):
        result = training.step(*batch(), GO_ON)
        gradients, values = plain.gradients_of(*batch())
        plain.update(gradients)
        np.testing.assert_allclose(float(result.values["loss"]), float(values["loss"]), rtol=1e-5)
        assert float(result.values["twice"]) == 2 * float(result.values["loss"])
    for guarded, reference in zip(training.everything(), plain.everything(), strict=True):
        np.testing.assert_allclose(guarded, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("branch")
def test_float16_gradients_that_overflow_lower_the_loss_scale():
    training = Training(loss_scale=4.0, every_gradient=False)
    assert training.step(*batch(gradient=np.inf), GO_ON).finite
    assert float(training.optimizer.dynamic_scale) == 2.0
    assert not training.step(*batch(goal=np.nan), GO_ON).finite
    assert float(training.optimizer.dynamic_scale) == 2.0  # at any scale, the loss is NaN


def test_loss_scale_below_the_minimum_is_refused():
    training = Training(loss_scale=4.0, every_gradient=False)
    guard = step_guard.StepGuard(training.ranks, limit=2)
    for _ in range(10):
        training.step(*batch(gradient=np.inf), GO_ON)
    guard.check_weights(training.model, training.optimizer, 10)  # the scale is 2**-8, the lowest allowed
    training.step(*batch(gradient=np.inf), GO_ON)
    with pytest.raises(UserError, match=r"loss scale has fallen below 0\.00390625.*mixed_bfloat16"):
        guard.check_weights(training.model, training.optimizer, 11)


def test_weight_that_is_not_finite_is_named(alone):
    training, guard = alone
    guard.check_weights(training.model, training.optimizer, 7)
    training.model.get_layer("bn").moving_variance.assign([1.0, np.inf, 1.0, 1.0])
    with pytest.raises(UserError, match="after step 7 the weight small/bn/moving_variance is not finite"):
        guard.check_weights(training.model, training.optimizer, 7)


@pytest.mark.usefixtures("branch")
def test_skipped_steps_are_logged_and_too_many_in_a_row_end_the_run(capsys):
    training = Training()

    def run(*batches):
        guard = step_guard.StepGuard(training.ranks, limit=2)
        for number, (images, targets) in enumerate(batches, 1):
            guard.check(number, training.step(images, targets, GO_ON), targets)
        guard.check_weights(training.model, training.optimizer, number)

    bad, good = batch(goal=np.nan), batch()
    run(bad, bad, good, bad, bad, good)  # never more than two bad steps in a row
    log = capsys.readouterr().err
    assert "step 1 is skipped: the loss is not finite; image ids 10, 11, 12, 13 (rank 0)\n" in log
    assert log.count("is skipped") == 4
    with pytest.raises(UserError, match=r"3 steps in a row .* step 4: a gradient is not finite\."):
        run(good, *[batch(gradient=np.nan)] * 3)


@pytest.mark.parametrize("other_is_finite", [False, True])
def test_rank_whose_loss_is_not_finite_is_named(capsys, other_is_finite):
    guard = step_guard.StepGuard(Pair(other_is_finite), limit=5)
    no = tf.constant(False)
    local_finite = tf.constant([not other_is_finite])
    _, targets = batch()
    guard.check(5, step_guard.StepResult({}, finite=no, local_finite=local_finite, stop=no), targets)
    bad = "10, 11, 12, 13 (rank 0)" if other_is_finite else "77, 78 (rank 1)"
    assert f"image ids {bad}\n" in capsys.readouterr().err


def test_log_of_a_skipped_step_names_at_most_sixteen_images(capsys):
    training = Training()
    guard = step_guard.StepGuard(training.ranks, limit=5)
    for size, last in ((16, "24, 25"), (17, "24, 25 and 1 more")):
        images, targets = batch(goal=np.nan, size=size)
        guard.check(1, training.step(images, targets, GO_ON), targets)
        assert f", {last} (rank 0)\n" in capsys.readouterr().err


def test_stop_request_of_any_rank_is_seen(alone):
    training, guard = alone
    images, targets = batch()
    half = tf.constant(0.5)  # the mean over two ranks if one of them asks to stop
    for asked, stops in ((GO_ON, False), (half, True), (GO_ON, True)):
        guard.check(1, training.step(images, targets, asked), targets)
        guard.check_weights(training.model, training.optimizer, 1)
        assert guard.stop == stops
