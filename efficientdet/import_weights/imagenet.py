"""EfficientNet trained on ImageNet, as a start for EfficientDet's backbone.

Two public forms: Keras' (`efficientnetb0_notop.h5`, keras.applications, b0 to b7) and the checkpoints of its
authors (tensorflow/tpu models/official/efficientnet), whose names are those of google/automl's EfficientDet.
Both were trained on the input of this project, RGB normalised by ImageNet's mean and standard deviation; the
AdvProp checkpoints were not. `--init_from=imagenet` downloads the first.
"""

import re
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from common.errors import UserError
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

_BLOCK = re.compile(r"^(block\d[a-z])_")


def download(backbone: str) -> str:
    """The path of Keras' file for a backbone, downloaded to ~/.keras/models if it is not there.

    Raises:
        UserError: Keras has no file for this backbone, or it cannot be downloaded.
    """
    if backbone not in KERAS_MD5:
        raise UserError(f"--init_from=imagenet has no weights of {backbone}: name a file or a run directory")
    name = f"{backbone.replace('-', '')}_notop.h5"
    try:
        return keras.utils.get_file(
            name, KERAS_FILES + name, cache_subdir="models", file_hash=KERAS_MD5[backbone]
        )
    except Exception as error:  # get_file raises a plain Exception where there is no network
        raise UserError(
            f"--init_from=imagenet: {KERAS_FILES}{name} cannot be downloaded. Get it elsewhere and give its "
            "path as --init_from"
        ) from error


def is_backbone(file: ForeignWeights) -> bool:
    """Whether a file is an EfficientNet in one of the two forms."""
    names = filter(None, map(canonical, file.shapes))
    return bool(_keras_blocks(file.shapes)) or any(name.startswith(f"{BACKBONE}/") for name in names)


def read_backbone(file: ForeignWeights, model: keras.Model) -> dict[str, np.ndarray]:
    """The values for the backbone of a model.

    Args:
        file: of an EfficientNet, its classifier or not.
        model: what `build_model` made; it is not changed.

    Returns:
        Path of a weight -> array, for every weight of the backbone.

    Raises:
        UserError: the file is damaged, or of another backbone.
    """
    blocks = _keras_blocks(file.shapes)
    if blocks:
        wanted = _keras_names(model, blocks, file.shapes)
    else:
        file = file.renamed(canonical)
        wanted = {path: names for path, names in automl_names(model).items() if path.startswith("backbone.")}
    return take(file, model, wanted)


def _keras_blocks(names: Iterable[str]) -> list[str]:
    """block1a, block2a, block2b, ...: in the order of the network."""
    return sorted({match[1] for match in map(_BLOCK.match, names) if match})


def _keras_names(
    model: keras.Model, blocks: list[str], known: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """Path of a weight of our backbone -> its name in keras/src/applications/efficientnet.py.

    For example `block_1.expand.conv` -> `block2a_expand_conv`; only the depthwise convolution and its batch
    norm have names of another kind. Keras 2 calls a depthwise kernel `depthwise_kernel`, Keras 3 `kernel`.
    """
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
        if part == "dwconv" and f"{theirs}/depthwise_kernel" in known:
            variable = "depthwise_kernel"
        names[weight.path] = (f"{theirs}/{variable}",)
    return names
