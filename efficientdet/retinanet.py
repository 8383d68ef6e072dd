"""RetinaNet's feature pyramid, without batch norm (arXiv 1708.02002).

    model = build_model("retinanet-rn50fpn", num_classes=80)

Structure and initialisation follow NVIDIA/retinanet-examples, odtk/backbones/fpn.py and odtk/model.py. Levels
3 to 5 come from the backbone (arXiv 1612.03144). Convolutions of stride 2 make level 6 from the backbone's
last feature, and level 7 from level 6. The differences from odtk are:

- An anchor whose best IoU with a box is below 0.5 is background; odtk ignores it if the IoU is above 0.4.
  Every box is assigned to at least its best anchor; in odtk, a box without an IoU of 0.5 has no anchor.
- The loss is divided by the number of positive anchors plus one; odtk does not add one.
- Batch norms train; odtk freezes them. --init_from with --freeze_batch_norm freezes them here.
- Weight decay applies to kernels only; in odtk it also applies to biases.
- Training images are not cropped; odtk's DALI loader crops them.
"""

import keras

from efficientdet.resnet import pad_for_stride

HEAD_STDDEV = 0.01  # of the heads' kernels: odtk/model.py initialize_layer; arXiv 1708.02002 section 4.1


def pyramid(
    features: dict[int, keras.KerasTensor], channels: int, min_level: int, max_level: int
) -> dict[int, keras.KerasTensor]:
    """Builds the feature pyramid: level -> (B, h, w, channels), from min_level to max_level."""
    last = max(features)
    merged, outputs = None, {}
    for level in range(last, min_level - 1, -1):
        lateral = _convolution(features[level], channels, 1, 1, f"fpn.lateral_{level}")
        if merged is not None:
            lateral = keras.layers.Add(name=f"fpn.merge_{level}")(
                [lateral, _upsample(merged, lateral.shape[1:3], f"fpn.merge_{level}")]
            )
        merged = lateral
        outputs[level] = _convolution(merged, channels, 3, 1, f"fpn.smooth_{level}")

    x = features[last]
    for level in range(last + 1, max_level + 1):
        if level > last + 1:
            x = keras.layers.Activation("relu", name=f"fpn.relu_{level}")(x)
        x = _convolution(x, channels, 3, 2, f"fpn.level_{level}")
        outputs[level] = x
    return outputs


def _convolution(
    x: keras.KerasTensor, filters: int, kernel: int, stride: int, name: str
) -> keras.KerasTensor:
    """Applies a convolution with bias and Glorot initialisation (odtk/backbones/fpn.py, init_layer)."""
    if stride > 1:
        x = pad_for_stride(x, kernel, name)
    padding = "same" if stride == 1 else "valid"
    return keras.layers.Conv2D(filters, kernel, strides=stride, padding=padding, name=name)(x)


def _upsample(x: keras.KerasTensor, size: tuple[int, int], name: str) -> keras.KerasTensor:
    """Doubles both sides by repeating every value; crops a row or column where `size` is odd."""
    x = keras.layers.UpSampling2D(2, name=f"{name}.upsample")(x)
    surplus = tuple((0, side - new_side) for side, new_side in zip(x.shape[1:3], size, strict=True))
    if surplus != ((0, 0), (0, 0)):
        x = keras.layers.Cropping2D(surplus, name=f"{name}.crop")(x)
    return x
