"""EfficientDet (arXiv 1911.09070): EfficientNet, BiFPN, and class and box heads that all levels share.

    model = build_model("efficientdet-d0", num_classes=90)
    class_logits, box_deltas = model(images)  # images: normalised, (B, 512, 512, 3)

Structure and initialisation follow google/automl efficientdet/tf2/efficientdet_keras.py and fpn_configs.py.
Layer names show the position in the network: `backbone.block_3.project.bn`, `fpn.cell_0.node_2.conv`,
`class_net.bn_1.level_5`, `box_net.predict`.
"""

import dataclasses
import itertools
import math

import keras

from common.layers import Swish
from efficientdet import retinanet
from efficientdet.backbone import batch_norm, extract_features
from efficientdet.config import EfficientDetConfig, get_config
from efficientdet.depthwise import SeparableConv2D

FUSION_EPSILON = 1e-4  # arXiv 1911.09070 section 3.3
CLASS_PRIOR = 0.01  # each class' probability at the start of training (arXiv 1708.02002 section 4.1)

# The last axis of these weights has k * C values.
CLASS_WEIGHTS = ("class_net.predict/pointwise_kernel", "class_net.predict/kernel", "class_net.predict/bias")


def build_model(
    model_name: str,
    num_classes: int = 90,
    image_size: tuple[int, int] | None = None,
    config: EfficientDetConfig | None = None,
) -> keras.Model:
    """Builds an EfficientDet or a RetinaNet with new weights, under the current Keras dtype policy.

    Args:
        model_name: one of config.MODEL_NAMES.
        num_classes: C; automl's COCO models have 90.
        image_size: (height, width) of the images, of any size; None: the size in the config.
        config: the model's configuration; None: the configuration of `model_name`.

    Returns:
        A model from images (B, height, width, 3) to two lists, class logits and box deltas. A list has one
        float32 tensor per level, finest first. Level l has (h, w) cells, `h = ceil(height / 2**l)` and
        `w = ceil(width / 2**l)`. Logits are (B, h, w, anchors_per_location * C): each anchor has C
        consecutive values. Deltas are (B, h, w, anchors_per_location * 4): each anchor has four consecutive
        values (dy, dx, log dh, log dw).

    Raises:
        UserError: `model_name` is unknown.
    """
    config = config or get_config(model_name)
    config = dataclasses.replace(config, image_size=image_size or config.image_size)

    images = keras.Input((*config.image_size, 3), name="images")
    features = extract_features(images, config.backbone, config.bn_momentum)
    if config.architecture == "retinanet":
        features = retinanet.pyramid(features, config.fpn_channels, config.min_level, config.max_level)
    else:
        features = _pyramid(features, config)
        for cell in range(config.fpn_cells):
            features = _bifpn_cell(features, config, f"fpn.cell_{cell}")
    class_logits = _head(
        features,
        config,
        filters=config.anchors_per_location * num_classes,
        bias=-math.log((1 - CLASS_PRIOR) / CLASS_PRIOR),
        name="class_net",
    )
    box_deltas = _head(features, config, filters=config.anchors_per_location * 4, bias=0.0, name="box_net")
    return keras.Model(images, (class_logits, box_deltas), name=model_name)


def anchors_of(model: keras.Model) -> int:
    """Returns the anchors per location of a model that `build_model` made."""
    return model.get_layer("box_net.predict").bias.shape[0] // 4


def _pyramid(
    features: dict[int, keras.KerasTensor], config: EfficientDetConfig
) -> dict[int, keras.KerasTensor]:
    pyramid = {level: x for level, x in features.items() if config.min_level <= level <= config.max_level}
    for level in range(max(features) + 1, config.max_level + 1):
        x = pyramid[level - 1]
        half_size = ((x.shape[1] + 1) // 2, (x.shape[2] + 1) // 2)
        pyramid[level] = _resample(x, half_size, config, f"fpn.level_{level}")
    return pyramid


def _bifpn_cell(
    features: dict[int, keras.KerasTensor], config: EfficientDetConfig, name: str
) -> dict[int, keras.KerasTensor]:
    """Builds one BiFPN cell: a top-down pass, then a bottom-up pass (arXiv 1911.09070 figure 3).

    Nodes are numbered as in google/automl tf2/fpn_configs.py bifpn_config.
    """
    lowest, highest = config.min_level, config.max_level
    names = (f"{name}.node_{node}" for node in itertools.count())
    down = {highest: features[highest]}
    for level in range(highest - 1, lowest - 1, -1):
        inputs = [features[level], down[level + 1]]
        down[level] = _bifpn_node(inputs, features[level], config, next(names))

    up = {lowest: down[lowest]}
    for level in range(lowest + 1, highest + 1):
        inputs = [features[level], down[level], up[level - 1]]
        if level == highest:  # the highest level has no top-down node
            inputs = [features[level], up[level - 1]]
        up[level] = _bifpn_node(inputs, features[level], config, next(names))
    return up


def _bifpn_node(
    inputs: list[keras.KerasTensor], target: keras.KerasTensor, config: EfficientDetConfig, name: str
) -> keras.KerasTensor:
    size = target.shape[1:3]
    inputs = [_resample(x, size, config, f"{name}.input_{index}") for index, x in enumerate(inputs)]
    if config.fpn_fusion == "fast":
        x = FastFusion(name=f"{name}.fuse")(inputs)
    else:
        x = keras.layers.Add(name=f"{name}.fuse")(inputs)
    x = Swish(name=f"{name}.swish")(x)
    make_convolution = SeparableConv2D if config.separable else keras.layers.Conv2D
    x = make_convolution(config.fpn_channels, 3, padding="same", name=f"{name}.conv")(x)
    return batch_norm(f"{name}.bn", config.bn_momentum)(x)


@keras.saving.register_keras_serializable("dali_detection")
class FastFusion(keras.layers.Layer):
    """Fast normalised fusion (arXiv 1911.09070 section 3.3): sum(relu(w_i) * x_i) / (sum(relu(w_j)) + 1e-4).

    The layer takes N tensors of the same shape. The N weights w_i start at 1.
    """

    def build(self, input_shapes: list[tuple]) -> None:
        self.fusion_weights = self.add_weight(
            name="fusion_weights", shape=(len(input_shapes),), initializer="ones", autocast=False
        )

    def call(self, inputs: list[keras.KerasTensor]) -> keras.KerasTensor:
        weights = keras.ops.relu(self.fusion_weights)  # float32, even if the features are float16
        shares = keras.ops.cast(weights / (keras.ops.sum(weights) + FUSION_EPSILON), inputs[0].dtype)
        return sum(x * share for x, share in zip(inputs, keras.ops.unstack(shares), strict=True))

    def compute_output_shape(self, input_shapes: list[tuple]) -> tuple:
        return input_shapes[0]


def _resample(
    x: keras.KerasTensor, size: tuple[int, int], config: EfficientDetConfig, name: str
) -> keras.KerasTensor:
    """Resizes `x` to `size` and gives it fpn_channels channels."""
    layers = keras.layers
    if x.shape[-1] != config.fpn_channels:
        x = layers.Conv2D(config.fpn_channels, 1, padding="same", name=f"{name}.conv")(x)
        x = batch_norm(f"{name}.bn", config.bn_momentum)(x)

    height, width = x.shape[1:3]
    if size[0] > height or size[1] > width:
        factors = (-(-size[0] // height), -(-size[1] // width))
        x = layers.UpSampling2D(factors, name=f"{name}.upsample")(x)
        surplus = ((0, height * factors[0] - size[0]), (0, width * factors[1] - size[1]))
        if surplus != ((0, 0), (0, 0)):
            x = layers.Cropping2D(surplus, name=f"{name}.crop")(x)
    elif size[0] < height or size[1] < width:
        strides = (-(-height // size[0]), -(-width // size[1]))
        pool_size = (strides[0] + 1, strides[1] + 1)
        x = layers.MaxPooling2D(pool_size, strides, padding="same", name=f"{name}.pool")(x)
    return x


def _head(
    features: dict[int, keras.KerasTensor],
    config: EfficientDetConfig,
    *,
    filters: int,
    bias: float,
    name: str,
) -> list[keras.KerasTensor]:
    """Predicts `filters` numbers per cell of each level. Levels share convolutions, but not batch norms."""
    plain = config.architecture == "retinanet"
    activation, activate = ("relu", keras.layers.ReLU) if plain else ("swish", Swish)
    convolutions = [
        _head_convolution(config, config.fpn_channels, 0.0, f"{name}.conv_{i}")
        for i in range(config.head_repeats)
    ]
    predict = _head_convolution(config, filters, bias, f"{name}.predict")
    outputs = []
    for level, x in sorted(features.items()):
        for i, convolution in enumerate(convolutions):
            x = convolution(x)
            if not plain:
                x = batch_norm(f"{name}.bn_{i}.level_{level}", config.bn_momentum)(x)
            x = activate(name=f"{name}.{activation}_{i}.level_{level}")(x)
        # float32 even under mixed precision, because the loss takes logarithms
        outputs.append(keras.layers.Identity(dtype="float32", name=f"{name}.level_{level}")(predict(x)))
    return outputs


def _head_convolution(config: EfficientDetConfig, filters: int, bias: float, name: str) -> keras.layers.Layer:
    make, initializers = keras.layers.Conv2D, {"kernel_initializer": "variance_scaling"}
    if config.architecture == "retinanet":
        initializers = {"kernel_initializer": keras.initializers.RandomNormal(stddev=retinanet.HEAD_STDDEV)}
    elif config.separable:
        make = SeparableConv2D
        initializers = dict.fromkeys(("depthwise_initializer", "pointwise_initializer"), "variance_scaling")
    constant = keras.initializers.Constant(bias)
    return make(filters, 3, padding="same", bias_initializer=constant, name=name, **initializers)
