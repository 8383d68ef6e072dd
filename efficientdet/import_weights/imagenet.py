"""Downloads the backbones of `--init_from=imagenet`, and reads EfficientNet's files.

EfficientNet's weights are public in two file formats: Keras' .h5 files (`efficientnetb0_notop.h5` to b7, of
keras.applications), and the checkpoints of its authors (tensorflow/tpu models/official/efficientnet). AdvProp
checkpoints do not fit: they need another normalisation. torch_files.py reads ResNet and MobileNetV2.
"""

import re
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from common.errors import UserError
from common.weights import weight_files
from efficientdet.import_weights.automl import BACKBONE, automl_names, canonical
from efficientdet.import_weights.tf_files import ForeignWeights, take

KERAS_FILES = "https://storage.googleapis.com/keras-applications/"
# MD5 of efficientnetb0_notop.h5, ...: keras/src/applications/efficientnet.py, WEIGHTS_HASHES.
KERAS_MD5 = {
    "efficientnet-b0": "50bc09e76180e00e4465e1a485ddc09d",
    "efficientnet-b1": "74c4e6b3e1f6a1eea24c589628592432",
    "efficientnet-b2": "111f8e2ac8aa800a7a99e3239f7bfb39",
    "efficientnet-b3": "af6d107764bb5b1abb91932881670226",
    "efficientnet-b4": "ebc24e6d6c33eaebbd558eafbeedf1ba",
    "efficientnet-b5": "38879255a25d3c92d5e44e04ae6cec6f",
    "efficientnet-b6": "9ecce42647a20130c1f39a5d4cb75743",
    "efficientnet-b7": "cbcfe4450ddf6f3ad90b1b398090fe4a",
}
TIMM_FILES = "https://huggingface.co/timm/"
# backbone: (repository, SHA-256 of its model.safetensors). tv_in1k is torchvision's IMAGENET1K_V1
# (timm/models/resnet.py). The checksums of ResNet-18 and ResNet-34 come from other projects, all others
# from huggingface.co. None: the checksum is not verified.
TIMM_SHA256: dict[str, tuple[str, str | None]] = {
    "resnet-18": ("resnet18.tv_in1k", "694f673df6520a3158624e8a89af086f59923ee4cd7436fe5bc3bc71d295ad81"),
    "resnet-34": ("resnet34.tv_in1k", "0bb82595a564991a9d424708b33f5d843f5aaed7f6c0886ff10849ff97022235"),
    "resnet-50": ("resnet50.tv_in1k", "5d061a3c593d795bfe682d9b152bafbcf550579873492def3515b46db1189888"),
    "resnet-101": ("resnet101.tv_in1k", None),
    "resnet-152": ("resnet152.tv_in1k", "15897077afdf4d6334dc0c3f8e6fb483afb3faa9298c139f3c6eb29bca6ae5b2"),
    "mobilenet-v2": (
        "mobilenetv2_100.ra_in1k",
        "55ea4fb3a96010b933710ebf44fc965b070d5cd054d3f35e44f2d1320b4a714e",
    ),
}

_BLOCK = re.compile(r"^(block\d[a-z])_")


def download(backbone: str) -> str:
    """Returns the path of a backbone's public file, after a download to ~/.keras/models if necessary.

    Raises:
        UserError: the backbone has no published file, or the download fails, or the checksum differs.
    """
    if backbone in KERAS_MD5:
        name = f"{backbone.replace('-', '')}_notop.h5"
        return weight_files.download(KERAS_FILES + name, name, KERAS_MD5[backbone])
    if backbone in TIMM_SHA256:
        name, checksum = TIMM_SHA256[backbone]
        address = f"{TIMM_FILES}{name}/resolve/main/model.safetensors"
        return weight_files.download(address, f"{name}.safetensors", checksum)
    raise UserError(f"--init_from=imagenet has no weights of {backbone}: give a file or a run directory")


def is_backbone(file: ForeignWeights) -> bool:
    """Returns whether a file has EfficientNet's weights, in Keras' format or in the format of its authors."""
    names = filter(None, map(canonical, file.shapes))
    return bool(_keras_blocks(file.shapes)) or any(name.startswith(f"{BACKBONE}/") for name in names)


def read_backbone(file: ForeignWeights, model: keras.Model) -> dict[str, np.ndarray]:
    """Reads the values of a model's backbone from a file with EfficientNet's weights.

    Returns:
        A dict: path of a weight -> array.

    Raises:
        UserError: the file is damaged or belongs to another backbone.
    """
    blocks = _keras_blocks(file.shapes)
    if blocks:
        names = _keras_names(model, blocks, file.shapes)
    else:
        file = file.renamed(canonical)
        automl = automl_names(model)
        names = {path: automl[path] for path in automl if path.startswith("backbone.")}
    return take(file, model, names)


def _keras_blocks(names: Iterable[str]) -> list[str]:
    """Returns the block names (block1a, block2a, block2b, ...) in the order of the network."""
    return sorted({match[1] for match in map(_BLOCK.match, names) if match})


def _keras_names(
    model: keras.Model, blocks: list[str], known: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """Maps the path of each backbone weight to its name in keras/src/applications/efficientnet.py."""
    names: dict[str, tuple[str, ...]] = {}
    for weight in model.weights:
        layer, _, variable = weight.path.rpartition("/")
        match = re.fullmatch(r"backbone\.(?:block_(\d+)|stem)\.(.+)", layer)
        if not match:
            continue
        prefix = "stem"
        if match[1]:
            number = int(match[1])
            prefix = blocks[number] if number < len(blocks) else f"block {number}"
        part = {"depthwise.conv": "dwconv", "depthwise.bn": "bn"}.get(match[2], match[2].replace(".", "_"))
        theirs = f"{prefix}_{part}"
        if part == "dwconv" and f"{theirs}/depthwise_kernel" in known:  # of Keras 2
            variable = "depthwise_kernel"
        names[weight.path] = (f"{theirs}/{variable}",)
    return names
