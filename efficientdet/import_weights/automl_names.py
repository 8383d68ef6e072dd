"""What google/automl calls the variables of our EfficientDet, and which model a list of names is of.

Its names come from efficientdet/tf2/efficientdet_keras.py and efficientdet/backbone/efficientnet_model.py;
those of TensorFlow 1 (efficientdet/efficientdet_arch.py) are the same. Order and meaning of the numbers agree
throughout: anchors (tf2/anchors.py) by level, row, column, scale, ratio; box outputs dy, dx, log dh, log dw.
"""

import re
from collections.abc import Collection, Iterable, Mapping

import keras

from efficientdet.config import MODEL_NAMES, get_config

BACKBONE = "backbone"  # in place of efficientnet-b0 and its like

# our layer -> automl's layer
_LAYERS = {
    r"backbone\.stem\.conv": "backbone/stem/conv2d",
    r"backbone\.stem\.bn": "backbone/stem/tpu_batch_normalization",
    r"backbone\.block_(\d+)\.expand\.conv": r"backbone/blocks_\1/conv2d",
    r"backbone\.block_(\d+)\.depthwise\.conv": r"backbone/blocks_\1/depthwise_conv2d",
    r"backbone\.block_(\d+)\.se\.reduce": r"backbone/blocks_\1/se/conv2d",
    r"backbone\.block_(\d+)\.se\.expand": r"backbone/blocks_\1/se/conv2d_1",
    r"fpn\.level_(\d+)\.conv": r"resample_p\1/conv2d",
    r"fpn\.level_(\d+)\.bn": r"resample_p\1/bn",
    r"fpn\.cell_(\d+)\.node_(\d+)\.fuse": r"fpn_cells/cell_\1/fnode\2",
    r"fpn\.cell_(\d+)\.node_(\d+)\.input_(\d+)\.conv": r"fpn_cells/cell_\1/fnode\2/resample_\3/conv2d",
    r"fpn\.cell_(\d+)\.node_(\d+)\.input_(\d+)\.bn": r"fpn_cells/cell_\1/fnode\2/resample_\3/bn",
    r"fpn\.cell_(\d+)\.node_(\d+)\.(conv|bn)": r"fpn_cells/cell_\1/fnode\2/op_after_combine/\3",
    r"(class|box)_net\.conv_(\d+)": r"\1_net/\1-\2",
    r"(class|box)_net\.bn_(\d+)\.level_(\d+)": r"\1_net/\1-\2-bn-\3",
    r"(class|box)_net\.predict": r"\1_net/\1-predict",
}
_PARTS = re.compile(r"(?:^|/)((?:efficientnet-[a-z0-9]+|resample_p\d+|fpn_cells|class_net|box_net)/.+)$")
_BACKBONE = re.compile(r"^(efficientnet-[a-z0-9]+)/(?:model/)?")
# what follows are numbers that say again where a node's inputs come from
_RESAMPLE = re.compile(r"/resample_(\d+)_\d+_\d+/")
_COMBINE = re.compile(r"/op_after_combine\d+/")


def canonical(name: str) -> str | None:
    """A name without the parts that differ between releases; None for a variable outside of the network.

    >>> canonical("efficientnet-b0/model/blocks_0/conv2d/kernel")
    'backbone/blocks_0/conv2d/kernel'
    >>> canonical("fpn_cells/cell_0/fnode3/resample_0_0_8/conv2d/bias")
    'fpn_cells/cell_0/fnode3/resample_0/conv2d/bias'
    """
    part = _PARTS.search(name)
    if not part:
        return None
    name = _BACKBONE.sub(f"{BACKBONE}/", part[1])
    return _COMBINE.sub("/op_after_combine/", _RESAMPLE.sub(r"/resample_\1/", name))


def automl_names(model: keras.Model) -> dict[str, tuple[str, ...]]:
    """Path of a weight -> the canonical name of its variable; fusion weights are one variable each.

    Weights that automl does not have (another family's) are left out.
    """
    paths = {weight.path for weight in model.weights}
    names = {}
    for weight in model.weights:
        layer, _, variable = weight.path.rpartition("/")
        theirs = _numbered_layer(layer, paths) or _rename(layer)
        if theirs is None:
            continue
        if variable == "fusion_weights":
            names[weight.path] = tuple(f"{theirs}/{wsm}" for wsm in numbered("WSM", weight.shape[0]))
        else:
            variable = "depthwise_kernel" if theirs.endswith("depthwise_conv2d") else variable
            names[weight.path] = (f"{theirs}/{variable}",)
    return names


def numbered(name: str, count: int) -> list[str]:
    """TensorFlow's names of `count` things of one name: name, name_1, name_2, ..."""
    return [name if number == 0 else f"{name}_{number}" for number in range(count)]


def _rename(layer: str) -> str | None:
    for ours, theirs in _LAYERS.items():
        match = re.fullmatch(ours, layer)
        if match:
            return match.expand(theirs)
    return None


def _numbered_layer(layer: str, paths: Collection[str]) -> str | None:
    """The layers of a block that automl only counts: one number less where the block does not expand."""
    match = re.fullmatch(
        r"backbone\.block_(\d+)\.(expand\.bn|depthwise\.bn|project\.bn|project\.conv)", layer
    )
    if not match:
        return None
    expands = f"backbone.block_{match[1]}.expand.conv/kernel" in paths
    if match[2] == "project.conv":
        return f"{BACKBONE}/blocks_{match[1]}/{numbered('conv2d', 2)[expands]}"
    place = ("expand.bn", "depthwise.bn", "project.bn").index(match[2]) - (not expands)
    return f"{BACKBONE}/blocks_{match[1]}/{numbered('tpu_batch_normalization', 3)[place]}"


def backbone_of(names: Iterable[str]) -> str | None:
    """The backbone whose variables are among automl's `names`, for example `efficientnet-b0`."""
    for name in names:
        part = _PARTS.search(name)
        backbone = part and _BACKBONE.match(part[1])
        if backbone:
            return backbone[1]
    return None


def models_of(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The models that a checkpoint may be of; some (`efficientdet-lite0`) are not in this project.

    Args:
        names: as the file has them.
        shapes: canonical name -> shape.
    """
    backbone = backbone_of(names)
    if not backbone:
        return []
    kernel = shapes.get("class_net/class-predict/depthwise_kernel", ())
    fitting = []
    for model_name in MODEL_NAMES:
        config = get_config(model_name)
        if config.backbone == backbone and kernel[2:3] in ((), (config.fpn_channels,)):
            fitting.append(model_name)
    return fitting or [backbone.replace("efficientnet", "efficientdet")]
