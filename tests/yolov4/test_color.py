"""Hue, saturation and brightness against colorsys."""

import colorsys

import numpy as np

from tests.yolov4.dali_stage import run_stage
from yolov4 import color


def test_factors_are_as_often_below_one_and_inverted_there():
    (factors,) = run_stage(lambda _: [color.random_factor(1.5, 1)], [(np.int32(0),)] * 4000)
    factors = np.concatenate(factors)
    assert factors.min() >= 1 / 1.5 - 1e-6 and factors.max() <= 1.5
    above = factors > 1
    assert abs(above.mean() - 0.5) < 0.04
    for drawn in (factors[above], 1 / factors[~above]):
        counts, _ = np.histogram(drawn, 5, (1, 1.5))
        assert counts.min() > 0.8 * len(drawn) / 5
    (ones,) = run_stage(lambda _: [color.random_factor(1.0, 1)], [(np.int32(0),)] * 9)
    assert set(np.concatenate(ones)) == {1.0}


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


def test_color_reaches_both_ends_of_its_ranges():
    image, before = colors_hsv(np.random.default_rng(0), 200)

    def changed(hue, saturation, exposure):
        (images,) = run_stage(lambda i: color.random_hsv([i], hue, saturation, exposure), [(image,)] * 150)
        after = np.array([to_hsv(one) for one in images])
        turned = ((after[..., 0] - before[:, 0] + 0.5) % 1 - 0.5) * 360
        return turned.mean(1), np.median(after[..., 1:] / before[:, 1:], 1)  # (150,), (150, 2)

    turned, ratios = changed(36.0, 1.0, 1.0)
    assert -42 < turned.min() < -34 and 34 < turned.max() < 42  # 36 comes out as 38 on the mean
    counts, _ = np.histogram(turned, 4, (-39, 39))
    assert counts.min() > 20
    turned, ratios = changed(0.0, 1.5, 1.0)
    assert ratios[:, 0].min() < 0.73 and ratios[:, 0].max() > 1.37  # there is saturation
    assert np.abs(turned).max() < 1
    turned, ratios = changed(0.0, 1.0, 1.5)
    assert 0.66 < ratios[:, 1].min() < 0.69 and 1.46 < ratios[:, 1].max() < 1.51
    assert np.abs(ratios[:, 0] - 1).max() < 0.02


def test_every_image_of_a_list_has_its_own_colours_and_none_leaves_its_range():
    image = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)
    images = run_stage(lambda i: color.random_hsv([i] * 4, 36.0, 1.5, 1.5), [(image,)] * 20)
    assert len({one.tobytes() for of_all in images for one in of_all}) == 80
    assert min(np.min(of_all) for of_all in images) == 0 and max(np.max(of_all) for of_all in images) == 1
