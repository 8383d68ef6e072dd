"""What the options build; what the built optimizers do is tested with each app's recipe."""

import keras
import pytest

from common.optimizers import make_optimizer


def test_options():
    plain = make_optimizer("sgd", 0.5, momentum=0.9, clip_norm=0.0, precision="float32")
    assert isinstance(plain, keras.optimizers.SGD)
    assert (plain.momentum, plain.global_clipnorm, plain.gradient_accumulation_steps) == (0.9, None, None)
    scaled = make_optimizer(
        "adam", 0.5, momentum=0.8, clip_norm=3.0, precision="mixed_float16", accumulate_steps=4
    )
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    inner = scaled.inner_optimizer
    assert isinstance(inner, keras.optimizers.Adam)
    assert (inner.beta_1, inner.global_clipnorm, inner.gradient_accumulation_steps) == (0.8, 3.0, 4)


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="sgdd"):
        make_optimizer("sgdd", 0.5, momentum=0.9, clip_norm=0.0, precision="float32")
