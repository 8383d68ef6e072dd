import contextlib
import resource

import h5py
import keras
import numpy as np
import pytest

from common.errors import UserError
from common.training import weights


def make_model(units=6, seed=0):
    """Convolution, batch norm and dropout: trainable weights, statistics, and random state."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(units, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def values(*objects):
    return [np.asarray(variable) for thing in objects for variable in thing.variables]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@contextlib.contextmanager
def disk_full_after(size):
    """Every file ends at `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_and_metadata_come_back(tmp_path):
    path = tmp_path / "m.weights.h5"
    metadata = {"label_map": {"names": ["Ärger", "x"]}, "config": [1, 2.5, None], "long": "z" * 200_000}
    model = make_model()
    weights.save(model, path, metadata)
    other = make_model(seed=1)
    assert weights.load(other, path) == metadata
    assert_same([w.numpy() for w in other.weights], [w.numpy() for w in model.weights])
    assert weights.read_metadata(path) == metadata
    make_model(seed=2).load_weights(path)  # the file is Keras' own
    with h5py.File(path) as file:
        assert "layers" in file


def test_any_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "m.weights.h5"
    weights.save(make_model(), path, {"a": 1})
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    places = [
        0,
        8,
        len(content) // 2,
        len(content) - 1,
        len(content) - 70,
        *rng.integers(0, len(content), 25),
    ]
    model = make_model(seed=1)
    before = values(model)
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"m\.weights\.h5: the file is"):
            weights.load(model, path)
        with pytest.raises(UserError, match=r"m\.weights\.h5"):
            weights.read_metadata(path)
    assert_same(values(model), before)


@pytest.mark.parametrize("length", [0, 1, 71, 72, 2000, -1, -72])
def test_a_truncated_file_is_noticed(tmp_path, length):
    path = tmp_path / "m.weights.h5"
    weights.save(make_model(), path, {})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match="cut short"):
        weights.load(make_model(), path)


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "m.weights.h5"
    make_model().save_weights(path)
    with pytest.raises(UserError, match="not written by this project"):
        weights.load(make_model(), path)
    for missing in (tmp_path / "no.weights.h5", tmp_path):
        with pytest.raises(UserError, match=str(missing)):
            weights.read_metadata(missing)


def test_weights_of_another_structure_are_refused_and_the_difference_is_named(tmp_path):
    path = tmp_path / "m.weights.h5"
    weights.save(make_model(units=6), path, {})
    with pytest.raises(
        UserError, match=r"kernel', \[3, 3, 3, 6\]\] where the model has .*kernel', \[3, 3, 3, 7\]\]"
    ):
        weights.load(make_model(units=7), path)
    longer = keras.Sequential([*make_model().layers, keras.layers.Dense(2)])
    longer.build((None, 8, 8, 3))
    weights.save(longer, path, {})
    with pytest.raises(UserError, match=r"dense_.* where the model has nothing"):  # Keras loads this one
        weights.load(make_model(), path)


@pytest.mark.parametrize("size", [0, 1000, 6000])
def test_a_full_disk_leaves_the_old_weights(tmp_path, size):
    path = tmp_path / "m.weights.h5"
    model = make_model()
    weights.save(model, path, {"step": 1})
    assert path.stat().st_size > 6000
    with (
        disk_full_after(size),
        pytest.raises(OSError, match=r"m\.weights\.h5 cannot be written: File too large"),
    ):
        weights.save(make_model(seed=1), path, {"step": 2})
    assert weights.load(make_model(seed=2), path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["m.weights.h5"]


def test_find_weights_prefers_the_best(tmp_path):
    with pytest.raises(UserError, match="neither best"):
        weights.find(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        weights.find(tmp_path / "absent.weights.h5")
    (tmp_path / "last.weights.h5").touch()
    assert weights.find(tmp_path).name == "last.weights.h5"
    (tmp_path / "best.weights.h5").touch()
    assert weights.find(tmp_path).name == "best.weights.h5"
    assert weights.find(str(tmp_path / "last.weights.h5")) == tmp_path / "last.weights.h5"
