"""Tests export.py --format=triton: triton_repository.py and triton_preprocess.py of common/export."""

import ast
import dataclasses
import importlib.util
import json
import re
import socket

import numpy as np
import onnx
import pytest
from nvidia import dali
from nvidia.dali._utils.autoserialize import invoke_autoserialize

from common import hparams
from common.data.labels import LabelMap
from common.data.open import open_images
from common.export import triton_repository
from tests.apps.conftest import one_app
from tests.commands import run
from tests.conftest import ROOT
from tests.refusal import refusal
from tests.triton import server

IMAGES = ROOT / "examples" / "shapes"
LABELS = LabelMap((3, 17), ('a "dog"', "b\\é"))


def write_repository(app, config, directory, suffix=".onnx"):
    """Writes a repository with an empty model."""
    placement = importlib.import_module(f"{app.name}.export_parts").placement(config)
    metadata = {"app": app.name, "label_map": LABELS.to_json(), "num_classes": 3}
    metadata["config"] = dataclasses.asdict(config)
    triton_repository.write(directory, suffix, lambda path: path.write_bytes(b""), placement, metadata)


def serialize(path, directory) -> bytes:
    """Serializes dali.py as Triton's DALI backend does."""
    spec = importlib.util.spec_from_file_location("dali_py", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    invoke_autoserialize(module, str(directory / "model.dali"))
    return (directory / "model.dali").read_bytes()


@pytest.mark.parametrize(
    ("app", "settings"),
    [
        ("efficientdet", "image_size=64x96"),
        ("yolov4", "image_size=64x96"),
        ("yolov4", "image_size=96x64,letterbox=true,antialias=false"),
    ],
    indirect=["app"],
    scope="session",
)
def test_dali_py_gives_the_pixels_of_the_evaluation_loader_bit_for_bit(app, settings, drawn, tmp_path):
    config = hparams.override(app.package.config.get_config(app.model_name), settings)
    write_repository(app, config, tmp_path)
    content = serialize(tmp_path / "preprocess" / "1" / "dali.py", tmp_path)
    pipeline = dali.Pipeline.deserialize(content, batch_size=16, num_threads=2, device_id=None)
    pipeline.build()
    source = open_images(str(drawn / "images"))
    longest = max(len(source.encoded(row)) for row in range(source.size))
    encoded = [source.encoded(row).ljust(longest, b"\0") for row in range(source.size)]
    pipeline.feed_input("image", [np.frombuffer(each, np.uint8) for each in encoded])
    images, sizes = (np.array(output.as_array()) for output in pipeline.run())

    loader = app.make_loader(
        "dali_cpu", source=source, config=config, batch_size=source.size, training=False, with_targets=False
    )
    expected, extra = next(iter(loader.dataset()))
    expected = np.asarray(app.package.predict.to_pixels(expected))
    np.testing.assert_array_equal(sizes, extra["image_sizes"])
    assert len(np.unique(sizes, axis=0)) == 12
    for image, reference, place in zip(images, expected, np.asarray(extra["letterbox"], int), strict=True):
        top, left, height, width = place
        inside = np.s_[top : top + height, left : left + width]
        np.testing.assert_array_equal(image[inside], reference[inside])
        image[inside] = 0
        assert not image.any()


@one_app
def test_triton_repository_of_an_engine_runs_it_with_tensorrt_on_a_gpu(app, command, tmp_path):
    config = app.package.config.get_config(app.model_name)
    labels = LabelMap((3, 17), ('a "dog"', "b\n\\é"))
    metadata = app.package.model_metadata.make_metadata(config, labels, 3)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    text = json.dumps(metadata | {"export": {"nms": "efficientnms_trt"}})
    onnx.helper.set_model_props(model, {"metadata": text})
    onnx.save(model, tmp_path / "mine.onnx")
    (tmp_path / "mine.plan").write_bytes(b"an engine")
    flags = ["--format=triton", f"--output={tmp_path}/repository"]
    command("export", f"--weights={tmp_path}/mine.plan", *flags)
    repository = tmp_path / "repository"
    assert (repository / "detector" / "1" / "model.plan").read_bytes() == b"an engine"
    text = (repository / "detector" / "config.pbtxt").read_text()
    assert 'backend: "tensorrt"' in text
    assert "kind: KIND_GPU" in text
    text = (repository / "detect" / "config.pbtxt").read_text()
    (class_names,) = re.findall(r'"class_names" value { string_value: (".*") } }', text)
    assert json.loads(ast.literal_eval(class_names)) == [*labels.names, "class 2"]  # protobuf's escapes
    assert (repository / "labels.txt").read_text() == 'a "dog"\nb \\é\nclass 2\n'

    message = refusal(command, "export", f"--weights={tmp_path}/mine.onnx", *flags)
    assert "was exported with --nms=efficientnms_trt: export it again with --nms=standard" in message
    for flag in ("--quantize=fp16", f"--verify_images={IMAGES}"):
        message = refusal(command, "export", f"--weights={tmp_path}/mine.plan", flag, *flags)
        assert message.startswith(f"{flag} has no effect on {tmp_path}/mine.plan")
    (tmp_path / "mine.tflite").write_bytes(b"")
    message = refusal(command, "export", f"--weights={tmp_path}/mine.tflite", *flags)
    assert "--format=triton takes weights, or an .onnx or .plan file" in message


@pytest.mark.slow
def test_triton_server_gives_the_detections_of_infer_py_and_only_damaged_requests_fail(
    app, command, tmp_path, monkeypatch
):
    if not server.PYTHON.exists():
        pytest.skip("no Triton server: make triton")
    repository = tmp_path / "repository"
    weights = f"--weights={ROOT}/{app.name}/demo.weights.h5"
    verify = f"--verify_images={IMAGES}/000004.jpg"
    command("export", weights, "--format=triton", f"--output={repository}", verify)
    files = sorted(map(str, IMAGES.iterdir()))
    flags = [f"--images={IMAGES}", f"--output_dir={tmp_path}/out", "--nodraw", "--score_threshold=0.05"]
    results = command("infer", f"--weights={repository}/detector/1/model.onnx", *flags)

    with server.serve(repository, tmp_path) as triton:
        ports = list(map(str, triton[1:3]))
        client = ROOT / "tests" / "triton" / "requests_of_clients.py"
        report = json.loads(run(server.PYTHON, client, repository, *ports, *files).stdout)
        monkeypatch.setenv("TRITON", f"127.0.0.1:{ports[0]}")
        shown = run(server.PYTHON, repository / "client.py", files[0]).stdout
    assert triton.process.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", triton.http_port))

    configs = report["configs"]
    assert configs["detector"]["dynamic_batching"]
    assert {configs[name]["instance_group"][0]["kind"] for name in ("preprocess", "detector")} == {"KIND_CPU"}
    labels = json.loads(configs["detect"]["parameters"]["class_names"]["string_value"])
    assert labels == (repository / "labels.txt").read_text().splitlines()
    category_ids = LabelMap.from_json(
        json.loads(onnx.load(repository / "detector/1/model.onnx").metadata_props[0].value)["label_map"]
    ).category_ids
    expected = [
        [
            [*result["bbox"], result["score"], category_ids.index(result["category_id"])]
            for result in results
            if result["image_id"] == number
        ]
        for number in range(len(files))
    ]
    for name in ("http", "grpc", "batch"):
        assert_equal(report[name], expected)
    assert len(shown.splitlines()) == sum(row[4] >= 0.3 for row in expected[0]) > 0
    assert all(line.split()[1] in labels for line in shown.splitlines())

    for number, answer in enumerate(report["answers"]):
        if number % 10 == 0:
            assert "DALI error" in answer
        else:
            assert_equal([answer], [expected[number % len(files)]])
    statistics = report["statistics"]
    print(f"\n{app.name}: encoded images {report['speed']}, pixels {report['speed_with_pixels']}")
    assert statistics["inference_count"] == 3 * len(files) + 180
    assert statistics["execution_count"] < 0.8 * statistics["inference_count"]
    assert max(row["batch_size"] for row in statistics["batch_stats"]) > 2


def assert_equal(answers, expected):
    """Compares rows [left, top, right, bottom, score, class] with rows [left, top, width, height, ...]."""
    for answer, reference in zip(answers, expected, strict=True):
        rows = np.array([row for row in answer if round(row[4], 6) >= 0.05])
        rows[:, 2:4] -= rows[:, :2]
        np.testing.assert_allclose(rows[:, :4], np.array(reference)[:, :4], atol=0.02)
        np.testing.assert_allclose(rows[:, 4:], np.array(reference)[:, 4:], atol=1e-5)
