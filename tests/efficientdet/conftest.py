import numpy as np
import pytest

from efficientdet.model import build_model
from tests.common.drawn_sets import draw_rectangle, write_coco
from tests.efficientdet.automl_files import SHAPES, SMALL_D0, variable_values
from tests.efficientdet.drawn_images import RED, SIZES


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory):
    """24 images of six shapes, alternately JPEG and PNG, with one red rectangle each."""
    random = np.random.default_rng(0)
    pictures = []
    for i in range(24):
        image, box = draw_rectangle(random, *SIZES[i % len(SIZES)], RED)
        pictures.append((10 + 7 * i, image, [(2, box)]))
    return write_coco(tmp_path_factory.mktemp("rectangles"), pictures, ("jpg", "png"))


@pytest.fixture(scope="session")
def automl_variables():
    """{name: values} of google/automl's d0, as far as the small d0 has them."""
    return {name: variable_values(name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def small_d0():
    return build_model("efficientdet-d0", 3, config=SMALL_D0)


@pytest.fixture
def random_d0(small_d0):
    """The small d0 for 3 classes, with random weights."""
    random = np.random.default_rng(0)
    for weight in small_d0.weights:
        weight.assign(random.uniform(0.1, 1, weight.shape))
    return small_d0
