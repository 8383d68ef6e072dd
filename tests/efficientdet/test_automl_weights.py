"""Tests reading weights of google/automl: import_weights/automl.py, tf_files.py and the program
automl_weights.py. The expected outputs come from automl's own model (see automl_files.py).
"""

import pathlib
import re
import shutil

import keras
import numpy as np
import pytest

from common.data.labels import LabelMap
from common.errors import UserError
from common.weights import model_metadata, weight_files
from common.weights.fine_tuning import coco_label_map
from efficientdet.automl_weights import load_automl
from efficientdet.import_weights.automl import canonical, count_outputs, read_automl
from efficientdet.import_weights.tf_files import open_weights
from efficientdet.init_from import init_from
from efficientdet.model import build_model
from efficientdet.predict import load_trained
from tests.efficientdet import automl_files
from tests.efficientdet.automl_files import SHAPES, SMALL_D0, weight_values, write_h5
from tests.refusal import refusal
from tests.small_apps import flag_values

# {our path: automl's name} of the class weights that depend on the number of classes
PREDICT = {f"class_net.predict/{x}": f"class_net/class-predict/{x}" for x in ("pointwise_kernel", "bias")}
PETS = LabelMap((1, 2, 3), ("cat", "dog", "cow"))


@pytest.fixture(scope="module")
def files(automl_variables, tmp_path_factory):
    """{form of a checkpoint: path}. All files have the same values."""
    directory = tmp_path_factory.mktemp("automl")
    averages = {"global_step": np.int64(7)}
    for name, values in automl_variables.items():
        averages |= {f"{name}/ExponentialMovingAverage": values, name: values + 1}
        averages |= {f"{name}/Momentum": values} if values.ndim else {}
    plain = automl_files.write_tensors(directory / "plain" / "model", automl_variables)
    (directory / "plain" / "checkpoint").write_text('model_checkpoint_path: "model"\n')
    return {
        "h5": write_h5(directory / "efficientdet-d0.h5", automl_variables),
        "checkpoint": plain,
        "directory": plain.parent,
        "index": plain.with_suffix(".index"),
        "averages": automl_files.write_tensors(directory / "averages" / "model.ckpt-7", averages),
        "objects": automl_files.write_objects(directory / "objects" / "ckpt-7", automl_variables),
    }


# --- all weights of a model ---


def test_outputs_with_automl_weights_equal_those_of_automls_model(files):
    d0 = build_model("efficientdet-d0", 90, SMALL_D0.image_size)
    report = load_automl(d0, files["h5"])
    assert len(report.copied) == len(d0.weights)
    assert not (report.initial or report.new_classes)
    images = np.float32(np.random.default_rng(0).normal(size=(1, *SMALL_D0.image_size, 3)))
    outputs = dict(zip(("class", "box"), d0(images, training=False), strict=True))
    lines = automl_files.read_table("automl_d0_outputs.txt")
    assert len(lines) == 10
    for head, level, shape, *numbers in lines:
        output, expected = np.asarray(outputs[head][int(level) - 3])[0], np.float32(numbers)
        assert output.shape == automl_files.parse_shape(shape)
        sample = output.ravel()[np.linspace(0, output.size - 1, expected.size).astype(int)]
        np.testing.assert_allclose(sample, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["checkpoint", "directory", "index", "averages", "objects"])
def test_automl_checkpoint_given_as_prefix_index_or_directory_gives_its_ema_weights_if_it_has_them(
    automl_variables, files, form
):
    file = open_weights(files[form])
    shapes = {name: shape for name, shape in file.shapes.items() if canonical(name) and name in SHAPES}
    assert shapes == SHAPES
    for name, values in zip(SHAPES, file.read(file.stored[name] for name in SHAPES), strict=True):
        np.testing.assert_array_equal(values, automl_variables[name])


@pytest.mark.parametrize("missing", ["values", "attribute"])
def test_automl_checkpoint_without_one_moving_average_is_refused(tmp_path, missing):
    variables = dict.fromkeys(("class_net/class-predict/bias", "box_net/box-predict/bias"), np.float32([3]))
    prefix = automl_files.write_objects(tmp_path / "ckpt-7", variables, missing=missing)
    with pytest.raises(UserError, match=r"incomplete\. It lacks the average of box_net/box-predict/bias$"):
        open_weights(prefix)


# --- classes ---


# (label map, rows of the file that its classes get)
LABEL_MAPS = {
    "ids_of_coco": (LabelMap((3, 17, 90), ("car", "cat", "toothbrush")), (2, 16, 89)),
    # VOC's name of COCO's motorcycle is motorbike.
    "other_ids": (LabelMap((1, 2, 3), ("zebra", "tram", "motorbike")), (23, None, 3)),
    "names_against_ids": (LabelMap((24, 25, 26), ("person", "12", "traffic light")), (0, None, 9)),
}


@pytest.mark.parametrize(("label_map", "rows"), LABEL_MAPS.values(), ids=LABEL_MAPS)
def test_init_from_copies_class_outputs_of_an_automl_file_by_class_name(
    random_d0, files, automl_variables, label_map, rows
):
    before = weight_values(random_d0)
    report = init_from(random_d0, label_map, str(files["h5"]))
    after = weight_values(random_d0)
    for path, name in PREDICT.items():
        new, old = (values[path].reshape(-1, 9, 3) for values in (after, before))
        stored = automl_variables[name].reshape(-1, 9, 90)
        for index, row in enumerate(rows):
            expected = old[..., index] if row is None else stored[..., row]
            np.testing.assert_array_equal(new[..., index], expected)
    depthwise = automl_variables["class_net/class-predict/depthwise_kernel"]
    np.testing.assert_array_equal(after["class_net.predict/depthwise_kernel"], depthwise)
    assert not report.initial
    assert len(report.new_classes) == rows.count(None)


def test_init_from_with_unknown_class_names_loads_all_weights_except_class_outputs(random_d0, files):
    before = weight_values(random_d0)
    report = init_from(random_d0, LabelMap((1, 2, 3), ("a", "b", "c")), str(files["checkpoint"]))
    assert report.initial == tuple(PREDICT)
    after = weight_values(random_d0)
    assert {path for path in after if np.array_equal(after[path], before[path])} == set(PREDICT)


def test_init_from_an_automl_file_with_fewer_anchors_leaves_class_and_box_outputs_at_initial_values(
    random_d0, automl_variables, tmp_path
):
    outputs = {path.replace("class", "box"): name.replace("class", "box") for path, name in PREDICT.items()}
    outputs |= PREDICT
    values = {name: automl_variables[name] for name in outputs.values()}
    fewer = {name: value[..., : value.shape[-1] * 2 // 3] for name, value in values.items()}
    report = init_from(random_d0, PETS, str(write_h5(tmp_path / "two.h5", automl_variables | fewer)))
    assert set(report.initial) == outputs.keys()


def test_three_classes_without_names_in_an_automl_file_are_matched_only_by_row_number(
    random_d0, automl_variables, tmp_path
):
    three = {name: automl_variables[name][..., :27] for name in PREDICT.values()}
    file = write_h5(tmp_path / "three.h5", automl_variables | three)
    assert init_from(random_d0, PETS, str(file)).new_classes == PETS.names
    assert not load_automl(random_d0, file).new_classes
    bias = random_d0.get_layer("class_net.predict").bias
    np.testing.assert_array_equal(bias, three["class_net/class-predict/bias"])


# --- files that are refused ---


def assert_refused(model, path, message):
    """Asserts a one-line error that names the file, and unchanged weights."""
    before = weight_values(model)
    text = refusal(init_from, model, PETS, str(path))
    for weight_path, value in weight_values(model).items():
        np.testing.assert_array_equal(value, before[weight_path])
    assert re.search(message, text) and pathlib.Path(path).name in text


def test_automl_file_of_another_model_is_refused_with_the_first_difference(random_d0, files):
    file = open_weights(files["h5"])
    shallow = {name: shape for name, shape in file.shapes.items() if "blocks_15" not in name}
    narrow = file.shapes | {"resample_p6/conv2d/kernel": (1, 1, 320, 32)}
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")], name="other")
    for model, shapes, message in [
        (random_d0, shallow, r"efficientdet-d0: backbone/blocks_15/\S+ is not in the file"),
        (
            random_d0,
            narrow,
            r"resample_p6/conv2d/kernel is \(1, 1, 320, 32\) in the file and \(1, 1, 320, 64\)",
        ),
        (other, file.shapes, "other: automl's models have no other/dense/kernel"),
    ]:
        assert re.search(f"do not fit .*{message}", refusal(read_automl, file._replace(shapes=shapes), model))


@pytest.mark.parametrize(("head", "size"), [("class", 811), ("class", 0), ("box", 37), ("box", 0)])
def test_automl_file_whose_class_outputs_do_not_match_its_box_outputs_is_refused(files, head, size):
    file, sizes = open_weights(files["h5"]), {"class": 810, "box": 36} | {head: size}
    shapes = file.shapes | {f"{head}_net/{head}-predict/bias": (size,)}
    message = f"{sizes['class']} class outputs do not match {sizes['box']} box outputs"
    assert message in refusal(count_outputs, file._replace(shapes=shapes))


def test_damaged_automl_h5_file_is_refused_in_one_line(random_d0, files, tmp_path):
    content = files["h5"].read_bytes()
    damaged = [content[:size] for size in (0, 100, 5_000, len(content) // 2, len(content) - 1)]
    damaged += [b"<html>404</html>", content[:8] + bytes(2_000) + content[2_008:]]
    file = tmp_path / "damaged.h5"
    for part in damaged:
        file.write_bytes(part)
        assert_refused(random_d0, file, "damaged")


BAD_NUMBERS = [
    ("efficientnet-b0/stem/conv2d/kernel", np.nan, "is not finite"),
    ("box_net/box-0-bn-3/moving_variance", -1, "is negative"),
]


@pytest.mark.parametrize(("name", "value", "problem"), BAD_NUMBERS, ids=["nan", "negative_variance"])
def test_nan_or_negative_variance_in_a_weights_file_is_reported_as_damage(
    random_d0, automl_variables, tmp_path, name, value, problem
):
    values = automl_variables[name].copy()
    values.flat[3] = value
    file = write_h5(tmp_path / "odd.h5", automl_variables | {name: values})
    assert_refused(random_d0, file, f"{canonical(name)} {problem}, so the file is damaged")


def flip_a_bit(content: bytes) -> bytes:
    return content[:200] + bytes([content[200] ^ 1]) + content[201:]


DATA = "model.data-00000-of-00001"
# id: (changed file, change of its bytes or None to remove it, path in the directory, message)
DAMAGE = {
    "no_data": (DATA, None, "", "the checkpoint is incomplete"),
    "truncated_data": (DATA, lambda content: content[:1_000_000], "", "the checkpoint is incomplete"),
    "flipped_bit": (DATA, flip_a_bit, "", "the checkpoint is incomplete"),
    "cut_index": ("model.index", lambda content: content[:1_000], "model", "the checkpoint is damaged"),
    "directory_without_index": ("model.index", None, "", "cannot be read: give a run directory of this"),
    "prefix_without_index": ("model.index", None, "model", "no such file"),
}


@pytest.mark.parametrize(("name", "change", "path", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_automl_checkpoint_is_refused_in_one_line(
    random_d0, files, tmp_path, name, change, path, message
):
    directory = shutil.copytree(files["directory"], tmp_path / "copy")
    if change:
        (directory / name).write_bytes(change((directory / name).read_bytes()))
    else:
        (directory / name).unlink()
    assert_refused(random_d0, directory / path, message)


def test_efficientdet_init_from_refuses_an_unknown_h5_file_and_weights_of_the_yolov4_app(random_d0, tmp_path):
    unknown = write_h5(tmp_path / "unknown.h5", {"a/b/kernel": np.ones(3)})
    assert_refused(random_d0, unknown, "neither google/automl's")
    dense = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    weight_files.save(dense, tmp_path / "yolov4.weights.h5", {"app": "yolov4"})
    assert_refused(random_d0, tmp_path / "yolov4.weights.h5", "saved by 'yolov4', not by efficientdet")


# --- the command ---


def convert(*arguments):
    module, values = flag_values("efficientdet.automl_weights", *arguments)
    module.convert(module.Args(**values))


D0 = "--model_name=efficientdet-d0"
SMALL = [D0, "--image_size=64x96", "--hparams=fpn_cells=1,head_repeats=1"]


def test_automl_weights_command_without_label_map_writes_cocos_80_classes(
    files, automl_variables, tmp_path, capsys
):
    output = tmp_path / "d0.weights.h5"
    arguments = [*SMALL, f"--weights={files['directory']}", f"--output={output}"]
    convert(*arguments)
    assert f"{output}: " in capsys.readouterr().out
    model, config, label_map, _ = load_trained(str(output))
    assert label_map == coco_label_map()
    assert (config.image_size, config.antialias) == ((64, 96), False)
    bias = np.asarray(model.get_layer("class_net.predict").bias).reshape(9, 80)
    stored = automl_variables["class_net/class-predict/bias"].reshape(9, 90)
    np.testing.assert_array_equal(bias, stored[:, np.array(label_map.category_ids) - 1])
    assert "exists" in refusal(convert, *arguments)


def test_automl_weights_command_with_label_map_writes_its_classes(files, tmp_path, monkeypatch, small_d0):
    monkeypatch.setattr("efficientdet.model.build_model", lambda *_, **__: small_d0)
    arguments = [*SMALL, f"--weights={files['h5']}", f"--label_map={tmp_path}/map.json"]
    LabelMap((1, 2, 90), ("one", "two", "ninety")).save(tmp_path / "map.json")
    convert(*arguments, f"--output={tmp_path}/three.weights.h5")
    metadata = model_metadata.read(tmp_path / "three.weights.h5")
    assert LabelMap.from_json(metadata["label_map"]).names == ("one", "two", "ninety")
    LabelMap((2, 91), ("two", "more")).save(tmp_path / "map.json")
    message = refusal(convert, *arguments, f"--output={tmp_path}/x.weights.h5")
    assert re.search("class ids from 2 to 91, but .* only class ids from 1 to 90", message)


def test_automl_weights_command_refuses_bad_flags_and_writes_nothing(files, tmp_path):
    weights, output = f"--weights={files['h5']}", f"--output={tmp_path}/a.weights.h5"
    for message, arguments in {
        "^set --weights .* and --model_name$": [weights, output],
        "must end in": [weights, "--output=a.h5", D0],
        "did you mean 'efficientdet-d0'": [weights, output, "--model_name=efficientdet-0"],
        "no such file": [f"--weights={tmp_path}/no.h5", output, D0],
    }.items():
        assert re.search(message, refusal(convert, *arguments))
    assert not list(tmp_path.iterdir())
