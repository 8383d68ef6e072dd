"""Tests exports: export_parts.py of each app, common/evaluation/exported.py, and exporter.py,
export_graph.py, tensorflow_files.py, onnx_file.py and verify.py of common/export."""

import collections
import importlib
import json
import re

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common import hparams
from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import exported
from common.export import export_graph, verify
from common.weights import model_metadata, weight_files
from tests.apps.conftest import coco_flags, slow_for
from tests.common.export import tensorrt_stand_in
from tests.refusal import refusal
from tests.small_apps import eagerly


@pytest.fixture(scope="module")
def weights(app, drawn, source, tmp_path_factory):
    """A weights file whose network gives clearly different scores.

    If scores were nearly equal, rounding would decide which boxes NMS keeps.
    """
    config = app.package.config.get_config(app.model_name)
    config = hparams.override(config, f"{app.tiny},image_size=64x96")
    keras.utils.set_random_seed(0)
    model = app.package.model.build_model(app.model_name, 3, config=config)
    random = np.random.default_rng(3)
    for weight in model.weights:
        if app.name == "yolov4" and weight.path.endswith("bn/gamma"):
            weight.assign(random.uniform(0.5, 3, weight.shape) * random.choice([-1, 1], weight.shape))
    parts = importlib.import_module(f"{app.name}.export_parts").make_exportable(model, config)
    pictures = [PIL.Image.open(file).convert("RGB") for file in sorted((drawn / "images").iterdir())]
    images = [parts.resize(tf.constant(np.asarray(picture)[None])) for picture in pictures]
    sizes = tf.constant([[picture.height, picture.width] for picture in pictures], tf.int32)
    raw = parts.network(export_graph.network_input(parts, tf.concat(images, axis=0), sizes))
    for kernel, bias, outputs, is_score in _last_layers(app, model, raw):
        values = np.concatenate([np.asarray(output).reshape(-1, bias.shape[0]) for output in outputs])
        gain = np.where(is_score, 2, 0.3) / values.std(axis=0)
        kernel.assign(np.asarray(kernel) * gain)
        bias.assign((np.asarray(bias) - values.mean(axis=0)) * gain - np.where(is_score, 1, 0))
    path = tmp_path_factory.mktemp("weights") / "best.weights.h5"
    metadata = app.package.model_metadata.make_metadata(config, source.label_map, 3)
    weight_files.save(model, path, metadata)
    return path


def _last_layers(app, model, raw):
    """Yields (kernel, bias, outputs, mask of the score channels) for each output layer."""
    variables = {weight.path: weight for weight in model.weights}
    if app.name == "efficientdet":
        half = len(raw) // 2
        for layer, outputs in (("class_net.predict", raw[:half]), ("box_net.predict", raw[half:])):
            kernel, bias = variables[f"{layer}/kernel"], variables[f"{layer}/bias"]
            yield kernel, bias, outputs, layer == "class_net.predict"
        return
    layers = sorted(
        (path.rpartition("/")[0] for path in variables if path.endswith("conv/bias")), reverse=True
    )
    for layer, output in zip(layers, raw, strict=True):  # in Darknet's order the finest head is the last
        is_score = np.tile(np.arange(output.shape[-1]) >= 4, output.shape[-2])
        yield variables[f"{layer}/kernel"], variables[f"{layer}/bias"], [output], is_score


@pytest.fixture(scope="module")
def expected(app, weights, command, drawn, tmp_path_factory):
    """Metrics and detections of eval.py with the weights file."""
    directory = tmp_path_factory.mktemp("expected")
    name = "hard" if app.name == "efficientdet" else "greedy"
    flags = [f"--weights={weights}", f"--output_dir={directory}", f"--hparams=nms_method={name}"]
    with eagerly():
        metrics = command("eval", *flags, "--pipeline_type=tensorflow", *coco_flags(drawn, "eval"))
    return metrics, json.loads((directory / "detections.json").read_text())


def _assert_detections_agree(detections, expected):
    """Asserts that 99.5 % of the detections agree: scores within 1e-4, and boxes within 0.03 px."""
    assert len(detections) == len(expected) > 500
    assert np.std([detection["score"] for detection in expected]) > 0.01

    def key(detection):
        return detection["image_id"], detection["category_id"]

    candidates = collections.defaultdict(list)
    for detection in detections:
        candidates[key(detection)].append([detection["score"], *detection["bbox"]])
    matched = 0
    for detection in expected:
        rows = np.array(candidates[key(detection)]).reshape(-1, 5)
        differences = np.abs(rows - [detection["score"], *detection["bbox"]])
        matched += (differences < [1e-4, *[0.03] * 4]).all(axis=1).any()
    assert matched >= 0.995 * len(expected)


def _evaluate(command, drawn, file, *flags):
    """Runs eval.py with an exported file. Returns its metrics and detections."""
    flags = [f"--weights={file}", "--pipeline_type=tensorflow", *flags]
    metrics = command("eval", *flags, *coco_flags(drawn, "eval"))
    return metrics, json.loads((file.parent / f"{file.name}.eval" / "detections.json").read_text())


def _assert_truncated_file_is_refused(command, drawn, exported_path, file):
    """`file` is the exported path, or a file in an exported directory."""
    content = file.read_bytes()
    for truncated in (content[:-5000], content[:5000]):
        file.write_bytes(truncated)
        message = refusal(command, "eval", f"--weights={exported_path}", *coco_flags(drawn, "eval"))
        assert re.search(rf"{exported_path.name} .*(damaged|cannot be opened)", message)


@slow_for("efficientdet")
def test_onnx_file_gives_the_detections_of_the_weights(
    app, weights, command, drawn, expected, tmp_path, capsys
):
    file = tmp_path / "detector.onnx"
    images = [f"--verify_images={drawn}/images", f"--verify_annotations={drawn}/instances.json"]
    command("export", f"--weights={weights}", "--format=onnx", f"--output={file}", *images)
    assert "MORE" not in capsys.readouterr().out

    metadata = model_metadata.read(file)
    assert metadata["app"] == app.name
    assert LabelMap.from_json(metadata["label_map"]).category_ids == (3, 17, 90)
    assert metadata["export"]["nms"] == "standard"
    # with five images per batch, the last batch is not full
    metrics, detections = _evaluate(command, drawn, file, "--batch_size=5")
    assert metrics["AP"] == pytest.approx(expected[0]["AP"], abs=1e-3)
    _assert_detections_agree(detections, expected[1])

    with pytest.raises(UserError, match="--image_size=128 has no effect on"):
        command("eval", f"--weights={file}", "--image_size=128", *coco_flags(drawn, "eval"))
    _assert_truncated_file_is_refused(command, drawn, file, file)


@slow_for("efficientdet")
def test_saved_model_gives_the_detections_for_images_of_any_size(weights, command, drawn, expected, tmp_path):
    directory = tmp_path / "detector"
    command("export", f"--weights={weights}", "--format=saved_model", f"--output={directory}")
    labels = LabelMap.from_json(model_metadata.read(directory)["label_map"])
    detect = tf.saved_model.load(str(directory)).signatures["serving_default"]
    document = json.loads((drawn / "instances.json").read_text())
    detections = []
    for image in document["images"]:
        content = tf.io.read_file(str(drawn / "images" / image["file_name"]))
        if image["file_name"].endswith("jpg"):
            pixels = tf.io.decode_jpeg(content, channels=3, dct_method="INTEGER_ACCURATE")
        else:
            pixels = tf.io.decode_png(content, channels=3)
        out = {name: value.numpy()[0] for name, value in detect(images=pixels[None]).items()}
        for row in range(out["count"]):
            left_top, right_bottom = out["boxes"][row].astype(float).reshape(2, 2)
            sides = right_bottom - left_top
            if not sides.all():  # eval.py drops boxes that are clipped to no area
                continue
            category_id = labels.category_ids[out["classes"][row]]
            box = {"bbox": [*left_top, *sides], "score": float(out["scores"][row])}
            detections.append({"image_id": image["id"], "category_id": category_id} | box)
    _assert_detections_agree(detections, expected[1])

    with pytest.raises(UserError, match="exists and is not of --format=saved_model"):
        command("export", f"--weights={weights}", "--format=saved_model", f"--output={tmp_path}")
    (variables,) = (directory / "variables").glob("*.data-*")
    _assert_truncated_file_is_refused(command, drawn, directory, variables)


@slow_for("efficientdet")
def test_tensorrt_plan_gives_the_detections_of_its_onnx_file(
    weights, command, drawn, expected, tmp_path, monkeypatch, capsys
):
    tensorrt_stand_in.install(monkeypatch)
    plan, onnx = tmp_path / "detector.plan", tmp_path / "detector.onnx"
    flags = ["--format=tensorrt", "--nms=standard", f"--verify_images={drawn}/images/0[01].jpg"]
    command("export", f"--weights={weights}", f"--output={plan}", *flags)
    assert "detector.plan: largest difference" in capsys.readouterr().out
    _assert_detections_agree(_evaluate(command, drawn, plan)[1], expected[1])

    random = np.random.default_rng(5)
    images = random.integers(256, size=(40, 64, 96, 3), dtype=np.uint8)  # the engine's largest batch is 16
    sizes = random.integers(20, 200, size=(40, 2), dtype=np.int32)
    run = exported.open_runner(plan)
    outputs, onnx_outputs = run(images, sizes), exported.open_runner(onnx)(images, sizes)
    assert outputs.keys() == onnx_outputs.keys()
    assert all(np.array_equal(outputs[name], onnx_outputs[name]) for name in outputs)
    with pytest.raises(UserError, match=r"does not accept images of shape \(2, 96, 64, 3\): export it again"):
        run(images[:2].transpose(0, 2, 1, 3), sizes[:2])

    _assert_truncated_file_is_refused(command, drawn, plan, plan)
    monkeypatch.setattr(tensorrt_stand_in, "__version__", "10.16.0.72")
    *_, message = refusal(exported.open_runner, plan).partition("detector.plan cannot ")
    assert ": TensorRT 10.16.0.72 takes only engines of this" in message
    onnx.unlink()
    with pytest.raises(UserError, match=r"detector\.onnx is missing\. The \.plan file needs its metadata"):
        command("infer", f"--weights={plan}", f"--images={drawn}/images", f"--output_dir={tmp_path}/out")


@slow_for("yolov4")
def test_litert_file_gives_the_detections_of_the_weights(
    weights, command, drawn, expected, tmp_path, monkeypatch
):
    file = tmp_path / "detector.tflite"
    flags = ["--format=litert", f"--output={file}", f"--verify_images={drawn}/images/0[01].jpg"]
    monkeypatch.setattr(verify, "FLOAT_LIMIT", 1e-12)
    message = refusal(command, "export", f"--weights={weights}", *flags)
    assert "is written, but its outputs differ from the model by" in message
    _assert_detections_agree(_evaluate(command, drawn, file)[1], expected[1])
    _assert_truncated_file_is_refused(command, drawn, file, file)


def test_eval_py_refuses_an_exported_file_without_metadata(command, drawn, tmp_path):
    (tmp_path / "x.tflite").write_bytes(b"no model")
    data = coco_flags(drawn, "eval")
    assert "has no metadata" in refusal(command, "eval", f"--weights={tmp_path}/x.tflite", *data)


def test_export_without_weights_is_refused(command, tmp_path):
    message = refusal(command, "export", "--format=onnx", f"--output={tmp_path}/x.onnx")
    assert "--weights is missing" in message
