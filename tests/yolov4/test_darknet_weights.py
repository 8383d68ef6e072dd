"""Tests Darknet's .weights files against OpenCV's importer and the published files' lengths."""

import dataclasses
import itertools
import struct
import types

import cv2
import numpy as np
import pytest

from common.weights.fine_tuning import coco_label_map
from tests.common.weights.test_fine_tuning import values_of
from tests.refusal import refusal
from tests.small_apps import flag_values
from yolov4.config import get_config
from yolov4.darknet_weights import load_darknet, save_darknet
from yolov4.decoding import decode_boxes
from yolov4.import_weights import darknet_files
from yolov4.import_weights.darknet_cfg import cfg_text
from yolov4.import_weights.darknet_files import read_darknet
from yolov4.model import build_model
from yolov4.predict import load_trained

HEADER = 20
# {model: (size of the .weights file, size of the backbone's file, convolutions in the backbone)}
# The backbones' files are yolov4.conv.137 and yolov4-tiny.conv.29.
PUBLISHED = {"yolov4": (257_717_640, 170_038_676, 92), "yolov4-tiny": (24_251_276, 19_789_716, 17)}
# {model: layer numbers of the convolutions before the yolo layers}
LAST = {"yolov4": (138, 149, 160), "yolov4-tiny": (36, 29), "yolov4-nano": (45, 37, 30)}
SPREAD = {"gamma": (0.5, 1.5), "beta": (-0.5, 0.5), "moving_mean": (-0.5, 0.5)}
SPREAD |= {"moving_variance": (0.3, 2.0), "bias": (-1.2, 1.2)}


def write_random_weights(name, num_classes, directory):
    """Returns a model with random weights, its config and its .weights file."""
    # A file's layout is the same at any width.
    config = dataclasses.replace(get_config(name), width=0.25 if name == "yolov4" else get_config(name).width)
    model = build_model(name, num_classes, config=config, any_size=True)
    random = np.random.default_rng(0)
    for weight in model.weights:
        if weight.name in SPREAD:
            weight.assign(random.uniform(*SPREAD[weight.name], weight.shape))
    file = directory / f"{name}-{num_classes}.weights"
    save_darknet(model, file, seen=32_032_000)
    return types.SimpleNamespace(model=model, file=file, config=config)


def block_floats(model):
    return [sum(int(np.prod(v.shape)) for v in block) for block in darknet_files.blocks_of(model)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_random_weights("yolov4-tiny", 80, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    return write_random_weights("yolov4-nano", 3, tmp_path_factory.mktemp("nano"))


@pytest.fixture(scope="module")
def networks(tmp_path_factory, tiny, nano):
    yolov4 = write_random_weights("yolov4", 80, tmp_path_factory.mktemp("yolov4"))
    return {"yolov4": yolov4, "yolov4-tiny": tiny, "yolov4-nano": nano}


@pytest.fixture
def partial(nano, tmp_path):
    path = tmp_path / "nano.conv.29"
    path.write_bytes(nano.file.read_bytes()[: HEADER + 4 * sum(block_floats(nano.model)[:17])])
    return path


# --- OpenCV's importer -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAST)
def test_outputs_boxes_and_scores_with_darknet_weights_equal_opencv(name, networks):
    network = networks[name]
    num_classes = network.model.outputs[0].shape[-1] - 5
    cfg = network.file.with_suffix(".cfg")
    cfg.write_text(cfg_text(network.config, num_classes))
    opencv = cv2.dnn.readNetFromDarknet(str(cfg), str(network.file))
    random, last = np.random.default_rng(1), LAST[name]
    for height, width in ((64, 96), (128, 32)):
        images = random.random((1, height, width, 3), np.float32)
        opencv.setInput(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        outputs = opencv.forward([f"conv_{n}" for n in last] + [f"yolo_{n + 1}" for n in last])
        for index, raw in enumerate(np.asarray(head) for head in network.model(images)):
            _, rows, columns, anchors, numbers = raw.shape
            expected = outputs[index].reshape(anchors, numbers, rows, columns).transpose(2, 3, 0, 1)
            assert expected.std() > 0.3
            np.testing.assert_allclose(raw[0], expected, atol=1e-3)

            detections = outputs[len(last) + index]  # (N, 5 + C): cx, cy, w, h, objectness, scores
            centers, half_sizes = detections[:, :2], detections[:, 2:4] / 2
            expected_boxes = np.concatenate([centers - half_sizes, centers + half_sizes], -1)
            boxes = np.asarray(decode_boxes(raw, network.config, index)).reshape(-1, 4)
            np.testing.assert_allclose(boxes, expected_boxes, atol=1e-3)

            probabilities = 1 / (1 + np.exp(-raw.reshape(-1, numbers).astype(np.float64)))
            np.testing.assert_allclose(probabilities[:, 4], detections[:, 4], atol=1e-3)
            scores = probabilities[:, 4:5] * probabilities[:, 5:]
            certain = np.abs(scores - 0.2) > 1e-3  # OpenCV sets scores of 0.2 and less to 0
            scores = np.where(scores > 0.2, scores, 0)
            np.testing.assert_allclose(scores[certain], detections[:, 5:][certain], atol=1e-3)


# --- complete files --------------------------------------------------------------------------------


def test_darknet_weights_files_have_the_published_lengths(published_yolov4, tiny):
    for model in (published_yolov4, tiny.model):
        file_bytes, backbone_bytes, convolutions = PUBLISHED[model.name]
        floats = block_floats(model)
        assert HEADER + 4 * sum(floats) == file_bytes
        assert HEADER + 4 * sum(floats[:convolutions]) == backbone_bytes
    content = tiny.file.read_bytes()
    assert len(content) == PUBLISHED["yolov4-tiny"][0]
    assert struct.unpack("<iiiq", content[:HEADER]) == (0, 2, 5, 32_032_000)


def test_darknet_weights_file_loaded_and_saved_again_has_the_same_bytes(nano, tmp_path):
    model = build_model("yolov4-nano", 3, (64, 64))
    contents = load_darknet(model, nano.file)
    assert contents[1:] == (26, 3, 32_032_000)
    save_darknet(model, tmp_path / "again.weights", contents.seen)
    assert (tmp_path / "again.weights").read_bytes() == nano.file.read_bytes()


@pytest.mark.parametrize("version", [(0, 1, 0), (0, 0, 0)], ids=["0.1.0", "0.0.0"])
def test_weights_header_of_an_old_darknet_version_counts_images_in_32_bits(tiny, tmp_path, version):
    old = tmp_path / "old.weights"
    old.write_bytes(struct.pack("<iiiI", *version, 4_000_000_000) + tiny.file.read_bytes()[HEADER:])
    contents = read_darknet(old, tiny.model)
    assert (contents.convolutions, contents.seen) == (21, 4_000_000_000)
    for path, value in values_of(tiny.model).items():
        np.testing.assert_array_equal(contents.values[path], value)


# --- parts, other class counts, wrong files --------------------------------------------------------


def test_darknet_weights_that_are_partial_or_of_other_classes_load_into_all_layers_that_fit(nano, partial):
    source = values_of(nano.model)
    for file, facts, layers_not_loaded in (
        (partial, (17, None), {29, 30, 35, 36, 37, 40, 43, 44, 45}),
        (nano.file, (26, 3), {30, 37, 45}),
    ):
        model = build_model("yolov4-nano", 20, (64, 64))
        before = values_of(model)
        contents = load_darknet(model, file)
        assert (contents.convolutions, contents.num_classes) == facts
        for path, value in values_of(model).items():
            number = int(path.split(".")[1].removeprefix("layer_"))
            expected = before if number in layers_not_loaded else source
            np.testing.assert_array_equal(value, expected[path], err_msg=path)


def message_of_refusal(model, file):
    """Returns the error message. No weight may change."""
    before = values_of(model)
    message = refusal(load_darknet, model, file)
    for path, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[path])
    return message


NAN, INFINITY = struct.pack("<f", np.nan), struct.pack("<f", np.inf)
DAMAGE = {
    "empty": (lambda content: b"", " have 0 bytes"),
    "two bytes": (lambda content: b"12", " have 2 bytes"),
    "zeros": (lambda content: bytes(24), " have 24 bytes"),
    "NaN": (lambda content: content[:-8] + NAN + content[-4:], "head.layer_45.conv/kernel is not finite"),
    "infinity": (lambda content: content[:-4] + INFINITY, "head.layer_45.conv/kernel is not finite"),
    "variance": (lambda content: content[:20] + content[420:] + content[20:420], "variance is negative"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_darknet_weights_file_is_refused_with_the_reason(nano, tmp_path, name):
    damage, message = DAMAGE[name]
    (tmp_path / "damaged.weights").write_bytes(damage(nano.file.read_bytes()))
    assert message in message_of_refusal(nano.model, tmp_path / "damaged.weights")


@pytest.mark.parametrize("missing_bytes", [1, 4 * 255], ids=["1 byte", "255 floats"])
def test_truncated_darknet_weights_file_is_refused_with_expected_and_actual_length(
    tiny, tmp_path, missing_bytes
):
    (tmp_path / "cut.weights").write_bytes(tiny.file.read_bytes()[:-missing_bytes])
    message = message_of_refusal(tiny.model, tmp_path / "cut.weights")
    assert f"have {24_251_276 - missing_bytes:,} bytes" in message and "has 24,251,276" in message


def test_darknet_weights_file_of_another_network_is_refused(networks):
    for network, other in itertools.permutations(networks.values(), 2):
        assert "another network" in message_of_refusal(network.model, other.file)


# --- the command -----------------------------------------------------------------------------------


def command(*arguments):
    module, values = flag_values("yolov4.darknet_weights", *arguments)
    module.convert(module.Args(**values))


def test_darknet_command_converts_from_darknet_and_back(tiny, tmp_path, capsys):
    ours, darknets = tmp_path / "tiny.weights.h5", tmp_path / "back.weights"
    command(f"--weights={tiny.file}", "--model_name=yolov4-tiny", "--image_size=64x96", f"--output={ours}")
    assert "21 convolutions, 80 classes (person, ...)" in capsys.readouterr().out
    model, config, label_map, _ = load_trained(str(ours))
    assert label_map == coco_label_map()
    assert config.image_size == (64, 96)
    loaded = values_of(model)
    for path, value in values_of(tiny.model).items():
        np.testing.assert_array_equal(loaded[path], value)

    command(f"--weights={ours}", f"--output={darknets}")
    assert darknets.read_bytes()[HEADER:] == tiny.file.read_bytes()[HEADER:]
    assert (tmp_path / "back.names").read_text().splitlines() == list(coco_label_map().names)
    opencv = cv2.dnn.readNetFromDarknet(str(tmp_path / "back.cfg"), str(darknets))
    assert len(opencv.getUnconnectedOutLayersNames()) == 2


def test_darknet_command_reads_class_names_from_the_names_file_next_to_the_weights(nano, tmp_path):
    (tmp_path / "mine.weights").write_bytes(nano.file.read_bytes())
    for names in (("1", "2", "3"), ("cell", "platelet", "white cell")):
        output = f"{tmp_path}/{names[0]}.weights.h5"
        command(f"--weights={tmp_path}/mine.weights", "--model_name=yolov4-nano", f"--output={output}")
        assert load_trained(output)[2].names == names
        (tmp_path / "mine.names").write_text("cell\nplatelet\n\nwhite cell\n")


def test_darknet_command_refuses_wrong_flags_and_existing_outputs(nano, partial, tmp_path):
    (tmp_path / "there.weights.h5").write_bytes(b"")
    (tmp_path / "there.cfg").write_bytes(b"")
    weights, name = f"--weights={nano.file}", "--model_name=yolov4-nano"
    cases = {
        "both needed": [weights],
        "must end in": [weights, name, "--output=x.h5"],
        "--model_name is missing": [weights, f"--output={tmp_path}/a.weights.h5"],
        "did you mean 'yolov4-nano'": [weights, "--model_name=nano4", f"--output={tmp_path}/a.weights.h5"],
        "exists": [weights, name, f"--output={tmp_path}/there.weights.h5"],
        "there.cfg exists": [weights, f"--output={tmp_path}/there.weights"],
        "have no effect on a conversion": [weights, name, f"--output={tmp_path}/a.weights"],
        "17 of 26 convolutions": [f"--weights={partial}", name, f"--output={tmp_path}/a.weights.h5"],
        "No such file": [weights, name, f"--output={tmp_path}/no/a.weights.h5"],
        "is not a .weights.h5 file": [f"--weights={nano.file}", f"--output={tmp_path}/a.weights"],
    }
    for message, arguments in cases.items():
        assert message in refusal(command, *arguments)
    assert not list(tmp_path.glob("a.*"))
