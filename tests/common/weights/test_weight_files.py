import re

import h5py
import keras
import numpy as np
import pytest

from common.weights import weight_files as weights
from tests.common.training.small_model import assert_same, files_end_at, make_model, values
from tests.refusal import refusal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.weights.h5"


def test_saved_weights_are_loaded_with_their_metadata_and_also_by_plain_keras(path):
    metadata = {"label_map": {"names": ["Ärger", "x"]}, "config": [1, 2.5, None], "long": "z" * 200_000}
    model, other = make_model(), make_model(seed=1)
    weights.save(model, path, metadata)
    assert weights.load(other, path) == weights.read_metadata(path) == metadata
    assert_same([w.numpy() for w in other.weights], [w.numpy() for w in model.weights])
    make_model(seed=2).load_weights(path)
    with h5py.File(path) as file:
        assert "layers" in file


def test_flipped_bit_anywhere_in_a_weights_h5_file_is_refused_and_changes_no_weight(path):
    weights.save(make_model(), path, {"a": 1})
    content, random = path.read_bytes(), np.random.default_rng(0)
    places = [0, 8, len(content) // 2, len(content) - 1, len(content) - 70]
    model = make_model(seed=1)
    before = values(model)
    for place in [*places, *random.integers(0, len(content), 15)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        assert "m.weights.h5: the file is" in refusal(weights.load, model, path)
        assert "m.weights.h5" in refusal(weights.read_metadata, path)
    assert_same(values(model), before)


def test_truncated_weights_h5_file_is_refused_as_incomplete(path):
    model = make_model()
    weights.save(model, path, {})
    content = path.read_bytes()
    for length in (0, 1, 71, 72, 2000, -1, -72):
        path.write_bytes(content[:length])
        assert "the file is incomplete" in refusal(weights.load, model, path)


def test_weights_h5_file_that_keras_itself_wrote_or_that_is_missing_is_refused(path, tmp_path):
    make_model().save_weights(path)
    assert "not written by this project" in refusal(weights.load, make_model(), path)
    for missing in (tmp_path / "no.weights.h5", tmp_path):
        assert str(missing) in refusal(weights.read_metadata, missing)


def test_weights_h5_file_of_a_model_with_other_layers_or_shapes_is_refused_with_first_difference(path):
    weights.save(make_model(units=6), path, {})
    shapes = r"kernel', \[3, 3, 3, 6\]\] where the model has .*kernel', \[3, 3, 3, 7\]\]"
    assert re.search(shapes, refusal(weights.load, make_model(units=7), path))
    longer = keras.Sequential([*make_model().layers, keras.layers.Dense(2)])
    longer.build((None, 8, 8, 3))
    weights.save(longer, path, {})
    assert re.search(r"dense_.* where the model has nothing", refusal(weights.load, make_model(), path))


@pytest.mark.parametrize("size", [0, 1000, 6000])
def test_full_disk_while_saving_leaves_the_old_weights(path, size):
    weights.save(make_model(), path, {"step": 1})
    assert path.stat().st_size > 6000
    full = pytest.raises(OSError, match=r"m\.weights\.h5 cannot be written: File too large")
    with files_end_at(size), full:
        weights.save(make_model(seed=1), path, {"step": 2})
    assert weights.load(make_model(seed=2), path) == {"step": 1}
    assert list(path.parent.iterdir()) == [path]


def test_best_weights_of_run_directory_are_preferred_to_last_weights(tmp_path):
    assert "neither best" in refusal(weights.find, tmp_path)
    assert "no such file" in refusal(weights.find, tmp_path / "absent.weights.h5")
    for name in ("last.weights.h5", "best.weights.h5"):
        (tmp_path / name).touch()
        assert weights.find(tmp_path).name == name
    assert weights.find(str(tmp_path / "last.weights.h5")) == tmp_path / "last.weights.h5"
