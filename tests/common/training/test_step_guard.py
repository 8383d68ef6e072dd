import keras
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.errors import UserError
from common.layers import BatchNormalization
from common.training import step_guard
from common.training.ema import AveragedWeights
from common.training.optimizers import apply_if
from tests.common.training.small_model import assert_same

NO_STOP = tf.constant(0.0)  # no rank asks for a stop


class Training:
    """Trains a small network with guarded steps."""

    def __init__(self, *, loss_scale=None, every_gradient=True, accumulate_steps=None):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Conv2D(4, 3, use_bias=False), BatchNormalization(name="bn")]
        layers = [keras.Input((8, 8, 3)), *layers, keras.layers.Conv2D(1, 6)]
        self.model = keras.Sequential(layers, name="small")
        self.optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate_steps)
        if loss_scale:
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer, initial_scale=loss_scale)
        self.optimizer.build(self.model.trainable_variables)
        self.averaged = AveragedWeights(self.model, 0.9)
        parts = Ranks(), self.gradients_of, self.update, self.model
        options = {"xla": True, "every_gradient": every_gradient}
        self.guarded_step = step_guard.guarded_step(*parts, **options)

    def step(self, stop_requested=NO_STOP, **options):
        images, targets = batch(**options)
        return self.guarded_step(images, targets, stop_requested)

    def gradients_of(self, images, targets):
        with tf.GradientTape() as tape:
            outputs = self.model(images, training=True)[:, 0, 0, 0]
            loss = tf.reduce_mean(tf.square(outputs - targets["goal"]))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        return [g + targets["added_to_gradients"][0] for g in gradients], {"loss": loss, "twice": 2 * loss}

    def update(self, gradients, condition=None):
        updates = tf.convert_to_tensor(self.optimizer.iterations)
        apply_if(condition, self.optimizer, gradients, self.model.trainable_variables)
        self.averaged.update(moved=tf.convert_to_tensor(self.optimizer.iterations) > updates)

    def values(self):
        variables = [*self.model.variables, *self.optimizer.variables, *self.averaged.variables]
        return [np.array(variable) for variable in variables]


def batch(*, goal=1.0, image=0.5, gradient=0.0, size=4):
    random = np.random.default_rng(0)
    images = tf.constant(random.random((size, 8, 8, 3), np.float32) * image)
    targets = {
        "goal": tf.fill([size], tf.constant(goal, tf.float32)),
        "added_to_gradients": tf.fill([size], tf.constant(gradient, tf.float32)),
        "image_ids": tf.range(10, 10 + size, dtype=tf.int64),
    }
    return images, targets


@pytest.fixture(
    params=[True, False, pytest.param(None, marks=pytest.mark.gpu)],
    ids=["branch as on a CPU", "no branch as on a GPU", "on a GPU"],
)
def branch(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(step_guard, "is_cpu_only", lambda: request.param)


# --- one step ---


BAD_STEPS = {
    "loss": ({"goal": np.nan}, None),
    "image": ({"image": np.inf}, 2),
    "gradient": ({"gradient": np.inf}, 2),
    "overflow of the gradients' norm": ({"gradient": 1e25}, None),
}


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize(("options", "accumulate_steps"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_training_step_with_a_non_finite_loss_or_gradient_changes_no_variable(options, accumulate_steps):
    training = Training(accumulate_steps=accumulate_steps)
    for _ in range(3):
        assert training.step().finite
    before = training.values()
    result = training.step(**options)
    assert not result.finite
    assert all(float(value) == 0.0 for value in result.values.values())  # so the sums of an epoch stay finite
    after = training.values()
    assert_same(after, before)
    assert training.step().finite
    changed = [not np.array_equal(a, b) for a, b in zip(after, training.values(), strict=True)]
    assert sum(changed) > len(changed) // 2


@pytest.mark.usefixtures("branch")
def test_guarded_training_step_with_finite_values_equals_a_plain_step():
    training, plain = Training(), Training()
    for _ in range(4):
        result = training.step()
        gradients, values = plain.gradients_of(*batch())
        plain.update(gradients)
        np.testing.assert_allclose(float(result.values["loss"]), float(values["loss"]), rtol=1e-5)
        assert float(result.values["twice"]) == 2 * float(result.values["loss"])
    for actual, expected in zip(training.values(), plain.values(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("branch")
def test_float16_gradients_that_overflow_halve_the_loss_scale():
    training = Training(loss_scale=4.0, every_gradient=False)
    assert training.step(gradient=np.inf).finite
    assert float(training.optimizer.dynamic_scale) == 2.0
    assert not training.step(goal=np.nan).finite
    assert float(training.optimizer.dynamic_scale) == 2.0  # at any scale, the loss is NaN


# --- checks on the host ---


def check_steps(training, guard, *batches):
    for number, (images, targets) in enumerate(batches, 1):
        guard.check(number, training.guarded_step(images, targets, NO_STOP), targets)
    guard.check_weights(training.model, training.optimizer, number)


@pytest.mark.usefixtures("branch")
def test_training_ends_with_an_error_when_the_loss_scale_falls_below_its_minimum():
    training = Training(loss_scale=4.0, every_gradient=False)
    guard = step_guard.StepGuard(Ranks(), limit=2)
    for _ in range(10):
        training.step(gradient=np.inf)
    guard.check_weights(training.model, training.optimizer, 10)  # the scale is 2**-8, the lowest allowed
    training.step(gradient=np.inf)
    with pytest.raises(UserError, match=r"loss scale has fallen below 0\.00390625.*mixed_bfloat16"):
        guard.check_weights(training.model, training.optimizer, 11)


def test_weight_that_becomes_non_finite_in_training_is_an_error_with_the_step_and_weight_name():
    training, guard = Training(), step_guard.StepGuard(Ranks(), limit=2)
    guard.check_weights(training.model, training.optimizer, 7)
    training.model.get_layer("bn").moving_variance.assign([1.0, np.inf, 1.0, 1.0])
    with pytest.raises(UserError, match="after step 7 the weight small/bn/moving_variance is not finite"):
        guard.check_weights(training.model, training.optimizer, 7)


@pytest.mark.usefixtures("branch")
def test_skipped_steps_are_logged_and_too_many_in_a_row_end_the_run(capsys):
    training = Training()
    bad, good = batch(goal=np.nan), batch()
    # never more than two bad steps in a row
    check_steps(training, step_guard.StepGuard(Ranks(), limit=2), bad, bad, good, bad, bad, good)
    log = capsys.readouterr().err
    assert "step 1 is skipped: the loss is not finite; image ids 10, 11, 12, 13 (rank 0)\n" in log
    assert log.count("is skipped") == 4
    bad = batch(gradient=np.nan)
    with pytest.raises(UserError, match=r"3 steps in a row .* step 4: a gradient is not finite\."):
        check_steps(training, step_guard.StepGuard(Ranks(), limit=2), good, bad, bad, bad)


class Rank0OfTwo(Ranks):
    """Rank 1 has the images 77 and 78."""

    world_size = 2

    def __init__(self, rank_1_is_finite):
        self.of_rank_1 = [[rank_1_is_finite, [77, 78]]]

    def gather(self, value):
        return [value, self.of_rank_1]


@pytest.mark.parametrize(("rank", "ids"), [(0, "10, 11, 12, 13"), (1, "77, 78")])
def test_log_of_a_skipped_step_names_the_rank_with_the_non_finite_loss_and_its_images(capsys, rank, ids):
    guard = step_guard.StepGuard(Rank0OfTwo(rank == 0), limit=5)
    no, local_finite = tf.constant(False), tf.constant([rank == 1])
    _, targets = batch()
    guard.check(5, step_guard.StepResult({}, finite=no, local_finite=local_finite, stop=no), targets)
    assert f"image ids {ids} (rank {rank})\n" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "last_ids"), [(16, "24, 25"), (17, "24, 25 and 1 more")])
def test_log_of_a_skipped_step_names_at_most_sixteen_images(capsys, size, last_ids):
    guard = step_guard.StepGuard(Ranks(), limit=5)
    check_steps(Training(), guard, batch(goal=np.nan, size=size))
    assert f", {last_ids} (rank 0)\n" in capsys.readouterr().err


def test_stop_request_of_any_rank_stops_all_later_steps():
    training, guard = Training(), step_guard.StepGuard(Ranks(), limit=2)
    half = tf.constant(0.5)  # the mean over two ranks if one of them asks to stop
    for stop_requested, stops in ((NO_STOP, False), (half, True), (NO_STOP, True)):
        guard.check(1, training.step(stop_requested), batch()[1])
        guard.check_weights(training.model, training.optimizer, 1)
        assert guard.stop == stops
