"""Hue, saturation and brightness against colorsys.

What is drawn for each image is compared with NumPy's in tests/oracle/test_yolov4_oracle.py.
"""

import colorsys

import numpy as np

from tests.yolov4.dali_stage import run_stage
from yolov4 import color


def colors_hsv(random, count=2000) -> tuple[np.ndarray, np.ndarray]:
    """Colours that no change takes out of range: uint8 (1, count, 3), and their HSV (count, 3)."""
    hsv = random.uniform((0, 0.15, 0.35), (1, 0.45, 0.55), (count, 3))
    rgb = np.array([colorsys.hsv_to_rgb(*one) for one in hsv])
    rgb = np.round(rgb * 255).astype(np.uint8)
    return rgb[np.newaxis], to_hsv(rgb / 255)


def to_hsv(rgb: np.ndarray) -> np.ndarray:
    """(..., 3) in 0..1 -> (N, 3)."""
    return np.array([colorsys.rgb_to_hsv(*one) for one in rgb.reshape(-1, 3)])


def test_value_is_exact_saturation_and_hue_are_near():
    """fn.hsv is linear in RGB. Here is how near: single colours, and the mean of all."""
    image, before = colors_hsv(np.random.default_rng(0))

    def changes(hue, saturation, exposure):
        sample = image, *np.float32([hue, saturation, exposure])
        (images,) = run_stage(lambda *nodes: [color.change_hsv(*nodes)], [sample])
        assert images[0].dtype == np.float32
        after = to_hsv(images[0])
        turned = ((after[:, 0] - before[:, 0] + 0.5) % 1 - 0.5) * 360
        return turned, after[:, 1] / before[:, 1], after[:, 2] / before[:, 2], images[0]

    turned, saturation, value, same = changes(0.0, 1.0, 1.0)
    assert np.abs(same * 255 - image).max() < 0.5
    for factor in (1.5, 1 / 1.5):
        turned, saturation, value, brighter = changes(0.0, 1.0, factor)
        assert np.abs(brighter * 255 - image * factor).max() < 0.01  # every channel by the factor
    for factor, low, high in ((1.5, 1.2, 1.55), (1 / 1.5, 0.6, 0.8)):
        turned, saturation, value, _ = changes(0.0, factor, 1.0)
        assert np.abs(turned).max() < 8 and abs(turned.mean()) < 0.2
        assert low < saturation.min() and saturation.max() < high
        assert np.abs(value - 1).max() < 0.25
    for degrees in (36.0, -36.0, 12.0):
        turned, saturation, value, _ = changes(degrees, 1.0, 1.0)
        assert abs(turned.mean() / degrees - 1) < 0.11  # degrees: not half of them, not radians
        assert (turned / degrees).min() > 0.4 and (turned / degrees).max() < 1.8
        assert abs(np.median(saturation) - 1) < 0.05 and abs(np.median(value) - 1) < 0.05
