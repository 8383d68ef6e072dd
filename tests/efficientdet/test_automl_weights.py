"""Tests automl_weights.py, import_weights/automl.py and tf_files.py."""

import pathlib
import re
import shutil

import keras
import numpy as np
import pytest

from common.data.labels import LabelMap
from common.errors import UserError
from common.weights import model_metadata
from common.weights import weight_files as weights
from common.weights.fine_tuning import coco_label_map
from efficientdet.automl_weights import load_automl
from efficientdet.import_weights.automl import automl_names, canonical, count_outputs, read_automl
from efficientdet.import_weights.tf_files import open_weights
from efficientdet.init_from import init_from
from efficientdet.model import build_model
from efficientdet.predict import load_trained
from tests.efficientdet import automl_files
from tests.efficientdet.automl_files import SHAPES, SMALL_D0, values_of, write_h5
from tests.refusal import refusal
from tests.small_apps import flag_values

PREDICT = {f"class_net.predict/{x}": f"class_net/class-predict/{x}" for x in ("pointwise_kernel", "bias")}
PETS = LabelMap((1, 2, 3), ("cat", "dog", "cow"))


@pytest.fixture(scope="module")
def files(variables, tmp_path_factory):
    """{form of a checkpoint: path}. All files have the same values."""
    directory = tmp_path_factory.mktemp("automl")
    averages = {"global_step": np.int64(7)}
    for name, values in variables.items():
        averages |= {f"{name}/ExponentialMovingAverage": values, name: values + 1}
        averages |= {f"{name}/Momentum": values} if values.ndim else {}
    plain = automl_files.write_tensors(directory / "plain" / "model", variables)
    (directory / "plain" / "checkpoint").write_text('model_checkpoint_path: "model"\n')
    return {
        "h5": write_h5(directory / "efficientdet-d0.h5", variables),
        "checkpoint": plain,
        "directory": plain.parent,
        "index": plain.with_suffix(".index"),
        "averages": automl_files.write_tensors(directory / "averages" / "model.ckpt-7", averages),
        "objects": automl_files.write_objects(directory / "objects" / "ckpt-7", variables),
    }


@pytest.fixture(scope="module")
def d0():
    return build_model("efficientdet-d0", 90, SMALL_D0.image_size)


# --- the whole model -------------------------------------------------------------------------------


def test_answers_are_those_of_automls_own_model(d0, files):
    report = load_automl(d0, files["h5"])
    assert len(report.copied) == len(d0.weights)
    assert not (report.initial or report.new_classes)
    images = np.float32(np.random.default_rng(0).normal(size=(1, *SMALL_D0.image_size, 3)))
    outputs = dict(zip(("class", "box"), d0(images, training=False), strict=True))
    lines = automl_files.lines_of("automl_d0_outputs.txt")
    assert len(lines) == 10
    for head, level, shape, *expected in lines:
        output = np.asarray(outputs[head][int(level) - 3])[0]
        assert output.shape == automl_files.numbers(shape)
        expected = np.float32(expected)
        found = output.ravel()[np.linspace(0, output.size - 1, expected.size).astype(int)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["checkpoint", "directory", "index", "averages", "objects"])
def test_every_form_has_the_same_numbers(variables, files, form):
    file = open_weights(files[form])
    known = {name: shape for name, shape in file.shapes.items() if canonical(name) and name in SHAPES}
    assert known == SHAPES
    for name, values in zip(SHAPES, file.read(file.stored[name] for name in SHAPES), strict=True):
        np.testing.assert_array_equal(values, variables[name])


@pytest.mark.parametrize("lost", ["values", "attribute"])
def test_an_average_without_values_is_an_error(tmp_path, lost):
    names = "class_net/class-predict/bias", "box_net/box-predict/bias"
    prefix = automl_files.write_objects(tmp_path / "ckpt-7", dict.fromkeys(names, np.float32([3])), lost=lost)
    with pytest.raises(UserError, match=r"incomplete\. It lacks the average of box_net/box-predict/bias$"):
        open_weights(prefix)


def test_every_variable_belongs_to_one_weight(d0):
    used = [name for names in automl_names(d0).values() for name in names]
    assert len(automl_names(d0)) == len(d0.weights)
    assert sorted(used) == sorted(map(canonical, SHAPES))


# --- classes ---------------------------------------------------------------------------------------


LABEL_MAPS = [
    (LabelMap((3, 17, 90), ("car", "cat", "toothbrush")), (2, 16, 89)),
    (LabelMap((1, 2, 3), ("zebra", "tram", "motorbike")), (23, None, 3)),  # other ids; VOC says motorbike
    (LabelMap((24, 25, 26), ("person", "12", "traffic light")), (0, None, 9)),  # names have priority over ids
]


@pytest.mark.parametrize(("label_map", "rows"), LABEL_MAPS)
def test_rows_follow_names(fresh, files, variables, label_map, rows):
    before = values_of(fresh)
    report = init_from(fresh, label_map, str(files["h5"]))
    after = values_of(fresh)
    for path, name in PREDICT.items():
        now, was = (values[path].reshape(-1, 9, 3) for values in (after, before))
        theirs = variables[name].reshape(-1, 9, 90)
        for index, row in enumerate(rows):
            expected = was[..., index] if row is None else theirs[..., row]
            np.testing.assert_array_equal(now[..., index], expected)
    depthwise = "class_net.predict/depthwise_kernel"
    np.testing.assert_array_equal(after[depthwise], variables["class_net/class-predict/depthwise_kernel"])
    assert not report.initial
    assert len(report.new_classes) == rows.count(None)


def test_other_classes_remake_one_layer_only(fresh, files):
    before = values_of(fresh)
    report = init_from(fresh, LabelMap((1, 2, 3), ("a", "b", "c")), str(files["checkpoint"]))
    assert report.initial == tuple(PREDICT)
    kept = {path for path, value in values_of(fresh).items() if np.array_equal(value, before[path])}
    assert kept == set(PREDICT)


def test_other_anchors_remake_both_last_layers(fresh, variables, tmp_path):
    last = {path.replace("class", "box"): name.replace("class", "box") for path, name in PREDICT.items()}
    last |= PREDICT
    values = {name: variables[name] for name in last.values()}
    fewer = {name: value[..., : value.shape[-1] * 2 // 3] for name, value in values.items()}
    report = init_from(fresh, PETS, str(write_h5(tmp_path / "two.h5", variables | fewer)))
    assert set(report.initial) == last.keys()


def test_classes_of_another_training_have_no_names(fresh, variables, tmp_path):
    fewer = {name: variables[name][..., :27] for name in PREDICT.values()}
    file = write_h5(tmp_path / "mine.h5", variables | fewer)
    assert init_from(fresh, PETS, str(file)).new_classes == PETS.names
    assert not load_automl(fresh, file).new_classes  # the model's 3 classes get these rows in order
    bias = fresh.get_layer("class_net.predict").bias
    np.testing.assert_array_equal(bias, fewer["class_net/class-predict/bias"])


# --- files that cannot be used ---------------------------------------------------------------------


def assert_refused(model, path, message):
    """Asserts a one-line error that names the file, and unchanged weights."""
    before = values_of(model)
    said = refusal(init_from, model, PETS, str(path))
    for weight_path, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[weight_path])
    assert re.search(message, said) and pathlib.Path(path).name in said


def test_another_model_is_refused_by_its_first_difference(fresh, files):
    file = open_weights(files["h5"])
    shallow = {name: shape for name, shape in file.shapes.items() if "blocks_15" not in name}
    narrow = file.shapes | {"resample_p6/conv2d/kernel": (1, 1, 320, 32)}
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")], name="other")
    for model, shapes, message in [
        (fresh, shallow, r"efficientdet-d0: backbone/blocks_15/\S+ is not in the file"),
        (fresh, narrow, r"resample_p6/conv2d/kernel is \(1, 1, 320, 32\) in the file and \(1, 1, 320, 64\)"),
        (other, file.shapes, "other: automl's models have no other/dense/kernel"),
    ]:
        assert re.search(f"do not fit .*{message}", refusal(read_automl, file._replace(shapes=shapes), model))


@pytest.mark.parametrize(("head", "size"), [("class", 811), ("class", 0), ("box", 37), ("box", 0)])
def test_class_and_box_outputs_must_go_together(files, head, size):
    file, sizes = open_weights(files["h5"]), {"class": 810, "box": 36} | {head: size}
    shapes = file.shapes | {f"{head}_net/{head}-predict/bias": (size,)}
    message = f"{sizes['class']} class outputs do not match {sizes['box']} box outputs"
    assert re.search(message, refusal(count_outputs, file._replace(shapes=shapes)))


def test_damaged_h5_files_are_one_line(fresh, files, tmp_path):
    content = files["h5"].read_bytes()
    damaged = [content[:size] for size in (0, 100, 5_000, len(content) // 2, len(content) - 1)]
    damaged += [b"<html>404</html>", content[:8] + bytes(2_000) + content[2_008:]]
    file = tmp_path / "damaged.h5"
    for part in damaged:
        file.write_bytes(part)
        assert_refused(fresh, file, "damaged")


BAD_NUMBERS = [
    ("efficientnet-b0/stem/conv2d/kernel", np.nan, "is not finite"),
    ("box_net/box-0-bn-3/moving_variance", -1, "is negative"),
]


@pytest.mark.parametrize(("name", "value", "problem"), BAD_NUMBERS)
def test_numbers_that_cannot_be_are_one_line(fresh, variables, tmp_path, name, value, problem):
    values = variables[name].copy()
    values.flat[3] = value
    file = write_h5(tmp_path / "odd.h5", variables | {name: values})
    assert_refused(fresh, file, f"{canonical(name)} {problem}, so the file is damaged")


def flip_a_bit(content: bytes) -> bytes:
    return content[:200] + bytes([content[200] ^ 1]) + content[201:]


DAMAGE = [
    ("model.data-00000-of-00001", None, "", "the checkpoint is incomplete"),
    ("model.data-00000-of-00001", lambda content: content[:1_000_000], "", "the checkpoint is incomplete"),
    ("model.data-00000-of-00001", flip_a_bit, "", "the checkpoint is incomplete"),
    ("model.index", lambda content: content[:1_000], "model", "the checkpoint is damaged"),
    ("model.index", None, "", "cannot be read: give a run directory of this project"),
    ("model.index", None, "model", "no such file"),
]


@pytest.mark.parametrize(("file", "change", "path", "message"), DAMAGE)
def test_checkpoints_that_are_not_whole_are_one_line(fresh, files, tmp_path, file, change, path, message):
    directory = shutil.copytree(files["directory"], tmp_path / "copy")
    if change:
        (directory / file).write_bytes(change((directory / file).read_bytes()))
    else:
        (directory / file).unlink()
    assert_refused(fresh, directory / path, message)


def test_other_files_are_one_line(fresh, tmp_path):
    other = write_h5(tmp_path / "other.h5", {"a/b/kernel": np.ones(3)})
    assert_refused(fresh, other, "neither google/automl's")
    small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    weights.save(small, tmp_path / "their.weights.h5", {"app": "yolov4"})
    assert_refused(fresh, tmp_path / "their.weights.h5", "saved by 'yolov4', not by efficientdet")
    (tmp_path / "empty").mkdir()
    assert_refused(fresh, tmp_path / "empty", "cannot be read: give a run directory of this project")


# --- the command -----------------------------------------------------------------------------------


def command(*arguments):
    module, values = flag_values("efficientdet.automl_weights", *arguments)
    module.convert(module.Args(**values))


D0 = "--model_name=efficientdet-d0"
SMALL = [D0, "--image_size=64x96", "--hparams=fpn_cells=1,head_repeats=1"]


def test_command_keeps_cocos_80(files, variables, tmp_path, capsys):
    output = tmp_path / "d0.weights.h5"
    arguments = [*SMALL, f"--weights={files['directory']}", f"--output={output}"]
    command(*arguments)
    assert f"{output}: " in capsys.readouterr().out
    model, config, label_map, _ = load_trained(str(output))
    assert label_map == coco_label_map()
    assert (config.image_size, config.antialias) == ((64, 96), False)
    bias = np.asarray(model.get_layer("class_net.predict").bias).reshape(9, 80)
    theirs = variables["class_net/class-predict/bias"].reshape(9, 90)
    np.testing.assert_array_equal(bias, theirs[:, np.array(label_map.category_ids) - 1])
    assert "exists" in refusal(command, *arguments)


def test_command_takes_a_label_map(files, tmp_path, monkeypatch, small_d0):
    monkeypatch.setattr("efficientdet.model.build_model", lambda *_, **__: small_d0)
    given = [*SMALL, f"--weights={files['h5']}", f"--label_map={tmp_path}/map.json"]
    LabelMap((1, 2, 90), ("one", "two", "ninety")).save(tmp_path / "map.json")
    command(*given, f"--output={tmp_path}/three.weights.h5")
    metadata = model_metadata.read(tmp_path / "three.weights.h5")
    assert LabelMap.from_json(metadata["label_map"]).names == ("one", "two", "ninety")
    LabelMap((2, 91), ("two", "more")).save(tmp_path / "map.json")
    with pytest.raises(UserError, match=r"class ids from 2 to 91, but .* only class ids from 1 to 90"):
        command(*given, f"--output={tmp_path}/x.weights.h5")


def test_command_refuses_in_one_line(files, tmp_path):
    given, output = f"--weights={files['h5']}", f"--output={tmp_path}/a.weights.h5"
    cases = {
        "^set --weights .* and --model_name$": [given, output],
        "must end in": [given, "--output=a.h5", D0],
        "did you mean 'efficientdet-d0'": [given, output, "--model_name=efficientdet-0"],
        "no such file": [f"--weights={tmp_path}/no.h5", output, D0],
    }
    for message, arguments in cases.items():
        assert re.search(message, refusal(command, *arguments))
    assert not list(tmp_path.iterdir())
