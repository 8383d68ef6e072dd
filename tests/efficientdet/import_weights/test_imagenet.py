"""Tests import_weights/imagenet.py against EfficientNetB0 of keras.applications."""

import hashlib
import pathlib
from unittest import mock

import h5py
import keras
import numpy as np
import pytest

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.data.labels import LabelMap
from common.errors import UserError
from efficientdet.import_weights import imagenet
from efficientdet.import_weights.imagenet import KERAS_MD5, read_backbone
from efficientdet.import_weights.tf_files import open_weights
from efficientdet.init_from import init_from
from tests.efficientdet.automl_files import SMALL_D0, variable_values, weight_values, write_h5, write_tensors

PETS = LabelMap((1, 2, 3), ("cat", "dog", "cow"))
# The last layers of levels 1 to 5: {our name: Keras' name}
TAPS = {
    "backbone.block_0.project.bn": "block1a_project_bn",
    "backbone.block_2.add": "block2b_add",
    "backbone.block_4.add": "block3b_add",
    "backbone.block_10.add": "block5c_add",
    "backbone.block_15.project.bn": "block7a_project_bn",
}
# The published files have standard deviations in place of variances (tensorflow/tensorflow issue 49930).
NORMALIZATION = {"normalization/mean": (0.485, 0.456, 0.406), "normalization/variance": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def b0():
    """EfficientNetB0 of Keras. `variable_values` computes its weights."""
    network = keras.applications.EfficientNetB0(
        weights=None, include_top=False, input_shape=(*SMALL_D0.image_size, 3), name="b0"
    )
    for weight in network.weights:
        if weight.path in NORMALIZATION:
            weight.assign(np.reshape(NORMALIZATION[weight.path], weight.shape))
        elif weight.path != "normalization/count":
            name = weight.path.replace("dwconv/kernel", "dwconv/depthwise_kernel")
            weight.assign(variable_values(name, tuple(weight.shape)))
    return network


def write_keras(path, network, form):
    """Groups and names are like those in efficientnetb0_notop.h5."""
    with h5py.File(path, "w") as file:
        root = file.create_group("model_weights") if form == "with head" else file
        root.attrs["layer_names"] = [layer.name for layer in network.layers]
        for layer in network.layers:
            root.create_group(layer.name).attrs["weight_names"] = []
        for weight in network.weights:
            layer, _, variable = weight.path.rpartition("/")
            if layer.endswith("_dwconv") and form != "keras 3":
                variable = "depthwise_kernel"
            name = f"{layer}/{variable}" + (":0" if form != "keras 3" else "")
            root[layer][name] = np.asarray(weight)
            root[layer].attrs["weight_names"] = [*root[layer].attrs["weight_names"], name]
    return path


@pytest.fixture(scope="module")
def notop(b0, tmp_path_factory):
    return write_keras(tmp_path_factory.mktemp("backbone") / "efficientnetb0_notop.h5", b0, "notop")


def test_efficientnet_b0_features_with_keras_imagenet_weights_equal_those_of_keras_applications(
    random_d0, notop, monkeypatch
):
    before = weight_values(random_d0)
    report = init_from(random_d0, PETS, str(notop))
    assert set(report.copied) == {path for path in before if path.startswith("backbone.")}
    assert set(report.initial) == before.keys() - set(report.copied)
    after = weight_values(random_d0)
    for path in report.initial:
        np.testing.assert_array_equal(after[path], before[path])
    monkeypatch.setattr(
        keras.src.applications.efficientnet.file_utils, "get_file", lambda *_, **__: str(notop)
    )
    network = keras.applications.EfficientNetB0(include_top=False, input_shape=random_d0.input_shape[1:])
    image = np.random.default_rng(0).integers(0, 256, (1, *SMALL_D0.image_size, 3), np.uint8)
    normalised = (image - np.float32(IMAGENET_MEAN)) / np.float32(IMAGENET_STD)
    ours = keras.Model(random_d0.input, [random_d0.get_layer(name).output for name in TAPS])(normalised)
    theirs = keras.Model(network.input, [network.get_layer(name).output for name in TAPS.values()])(image)
    for features, expected in zip(ours, theirs, strict=True):
        assert np.std(expected) > 0.1
        np.testing.assert_allclose(features, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_init_from_imagenet_downloads_the_file_of_keras_applications(random_d0, notop, monkeypatch):
    theirs, name = keras.src.applications.efficientnet, "efficientnetb0_notop.h5"
    assert {f"efficientnet-{of}": md5 for of, (_, md5) in theirs.WEIGHTS_HASHES.items()} == KERAS_MD5
    get_file = mock.Mock(return_value=str(notop))
    monkeypatch.setattr(keras.utils, "get_file", get_file)
    assert len(init_from(random_d0, PETS, "imagenet", "efficientnet-b0").copied) > 200
    assert get_file.call_args.args == (name, theirs.BASE_WEIGHTS_PATH + name)
    assert get_file.call_args.kwargs["file_hash"] == KERAS_MD5["efficientnet-b0"]


def test_failed_imagenet_download_says_where_to_put_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(keras.src.backend.config, "_KERAS_DIR", str(tmp_path))
    monkeypatch.setattr(imagenet, "TIMM_FILES", f"file://{tmp_path}/")
    where = r"file://.*/resnet18\.tv_in1k/resolve/main/model\.safetensors"
    place = rf"Copy it from another machine to {tmp_path}/models/resnet18\.tv_in1k\.safetensors$"
    with pytest.raises(UserError, match=rf"^--init_from=imagenet: {where} cannot be downloaded .*{place}"):
        imagenet.download("resnet-18")
    served = tmp_path / "resnet18.tv_in1k/resolve/main/model.safetensors"
    served.parent.mkdir(parents=True)
    served.write_bytes(b"another file")
    with pytest.raises(
        UserError, match=rf"{where} .*hash does not match the provided value of 694f.*{place}"
    ):
        imagenet.download("resnet-18")
    monkeypatch.setitem(
        imagenet.TIMM_SHA256, "resnet-18", ("resnet18.tv_in1k", hashlib.sha256(b"another file").hexdigest())
    )
    assert pathlib.Path(imagenet.download("resnet-18")).read_bytes() == b"another file"
    with pytest.raises(UserError, match=r"^--init_from=imagenet has no weights of resnet-nano: "):
        imagenet.download("resnet-nano")


@pytest.mark.parametrize("form", ["with head", "keras 3"])
def test_imagenet_weights_with_head_or_from_keras_3_have_the_same_backbone_values(
    random_d0, b0, notop, tmp_path, form
):
    values = read_backbone(open_weights(notop), random_d0)
    others = read_backbone(open_weights(write_keras(tmp_path / "other.h5", b0, form)), random_d0)
    assert values.keys() == others.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(others[path], value)


@pytest.mark.parametrize("prefix", ["efficientnet-b0", "efficientnet-b0/model"])
def test_moving_averages_of_the_efficientnet_authors_checkpoint_become_the_backbone(
    random_d0, automl_variables, tmp_path, prefix
):
    backbone = {k: values for k, values in automl_variables.items() if k.startswith("efficientnet-b0/")}
    tensors = {"global_step": np.int64(3), f"{prefix}/head/dense/bias": np.zeros(1000, np.float32)}
    for name, values in backbone.items():
        name = name.replace("efficientnet-b0", prefix)
        tensors |= {name: values + 1, f"{name}/ExponentialMovingAverage": values, f"{name}/RMSProp": values}
    checkpoint = write_tensors(tmp_path / "authors" / "model.ckpt", tensors)
    report = init_from(random_d0, PETS, str(checkpoint))
    assert len(report.copied) == len(backbone)
    weights = weight_values(random_d0)

    init_from(random_d0, PETS, str(write_h5(tmp_path / "d0.h5", automl_variables)))
    for path, value in weight_values(random_d0).items():
        assert np.array_equal(value, weights[path]) == path.startswith("backbone."), path


# (changed variables, new shape or None to remove them, message)
MISFITS = [
    ("block6a_se_expand/bias", None, "block6a_se_expand/bias is not in the file"),
    ("block7a_", None, "block 15_expand_conv/kernel is not in the file"),
    ("stem_conv/kernel", (3, 3, 3, 40), r"is \(3, 3, 3, 40\) in the file and \(3, 3, 3, 32\) in the model"),
]


@pytest.mark.parametrize(("changed", "shape", "message"), MISFITS, ids=["no_bias", "no_block", "wide_stem"])
def test_imagenet_file_of_an_incomplete_or_different_backbone_is_refused(
    random_d0, notop, changed, shape, message
):
    file = open_weights(notop)
    shapes = {name: s for name, s in file.shapes.items() if not name.startswith(changed)}
    shapes |= {changed: shape} if shape else {}
    with pytest.raises(UserError, match=f"do not fit efficientdet-d0: .*{message}"):
        read_backbone(file._replace(shapes=shapes), random_d0)
