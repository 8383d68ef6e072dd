"""YOLOv4 and YOLOv4-tiny as Darknet's numbered list of layers (arXiv 2004.10934 section 3.4).

    for layer in describe(get_config("yolov4"), num_classes=80): print(layer)

Structure and numbering follow AlexeyAB/darknet cfg/yolov4.cfg and cfg/yolov4-tiny.cfg.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from yolov4.config import YOLOv4Config

IMAGE_CHANNELS = 3


@dataclasses.dataclass(frozen=True)
class Layer:
    """One section of a .cfg file.

    Attributes:
        kind: the section's name.
            convolutional: convolution padded by size // 2, then batch norm or a bias, then `activation`.
            route: concatenates the channels of its inputs. With the option `groups`, splits the channels of
                its only input into `groups` parts, and returns part `group_id`.
            shortcut: adds its two inputs.
            maxpool: takes the maximum over size x size.
            upsample: repeats every value in both directions.
            yolo: marks its input as the raw output of head number `head`, counted from the finest stride.
        part: backbone, neck or head.
        index: Darknet's layer number. Sections of all kinds are counted.
        inputs: indices of the layers that this layer reads; empty for the first layer.
        channels: number of channels of the layer's output.
        options: name of an option in Darknet -> its value.
    """

    kind: str
    part: str
    index: int
    inputs: tuple[int, ...]
    channels: int
    options: dict[str, Any]


def describe(config: YOLOv4Config, num_classes: int) -> list[Layer]:
    """Lists the layers of a model in Darknet's order."""
    layers: list[Layer] = []
    outputs = config.anchors_per_location * (5 + num_classes)
    neck = _Part(layers, "neck", config.width, "leaky")
    head = _Part(layers, "head", config.width, "leaky")
    if config.backbone == "csp_darknet53":
        _yolov4(_Part(layers, "backbone", config.width, "mish"), neck, head, outputs)
    else:
        build = _yolov4_tiny if config.backbone == "csp_darknet_tiny" else _yolov4_nano
        build(_Part(layers, "backbone", config.width, "leaky"), neck, head, outputs)
    return layers


@dataclasses.dataclass
class _Part:
    layers: list[Layer]
    name: str
    width: float
    activation: str

    def conv(self, x: Layer | None, filters: int, size: int, stride: int = 1) -> Layer:
        """Appends convolution, batch norm and activation; `filters` is multiplied by the model's width."""
        channels = max(8 * math.floor(self.width * filters / 8 + 0.5), 8)
        options = {"size": size, "stride": stride, "pad": 1, "activation": self.activation}
        inputs = [x] if x else []
        return self._append("convolutional", inputs, channels, batch_normalize=1, filters=channels, **options)

    def predict(self, x: Layer, filters: int, outputs: int, head: int) -> None:
        """Appends a head: a 3 x 3 convolution, and a linear 1 x 1 convolution with the raw outputs."""
        x = self.conv(x, filters, 3)
        options = {"filters": outputs, "size": 1, "stride": 1, "pad": 1, "activation": "linear"}
        x = self._append("convolutional", [x], outputs, **options)
        self._append("yolo", [x], outputs, head=head)

    def half(self, x: Layer) -> Layer:
        return self._append("route", [x], x.channels // 2, groups=2, group_id=1)

    def concat(self, *inputs: Layer) -> Layer:
        return self._append("route", inputs, sum(x.channels for x in inputs))

    def add(self, x: Layer, other: Layer) -> Layer:
        return self._append("shortcut", [x, other], x.channels, activation="linear")

    def max_pool(self, x: Layer, size: int, stride: int) -> Layer:
        return self._append("maxpool", [x], x.channels, size=size, stride=stride)

    def upsample(self, x: Layer) -> Layer:
        return self._append("upsample", [x], x.channels, stride=2)

    def _append(self, kind: str, inputs: Sequence[Layer], channels: int, **options: Any) -> Layer:
        if inputs and kind != "route" and inputs[0] is not self.layers[-1]:
            # In Darknet, only a route can read a layer that is not the last one. Add a route to `inputs[0]`.
            self.concat(inputs[0])
        numbers = tuple(x.index for x in inputs)
        layer = Layer(kind, self.name, len(self.layers), numbers, channels, options)
        self.layers.append(layer)
        return layer


def _yolov4(backbone: _Part, neck: _Part, head: _Part, outputs: int) -> None:
    c3, c4, c5 = _csp_darknet53(backbone)  # strides 8, 16, 32
    top5 = _spp(neck, c5)
    top4 = _top_down(neck, top5, c4, 256)
    p3 = _top_down(neck, top4, c3, 128)
    head.predict(p3, 256, outputs, head=0)
    p4 = _bottom_up(neck, p3, top4, 256)
    head.predict(p4, 512, outputs, head=1)
    p5 = _bottom_up(neck, p4, top5, 512)
    head.predict(p5, 1024, outputs, head=2)


def _csp_darknet53(part: _Part) -> tuple[Layer, Layer, Layer]:
    """Appends Darknet-53 (arXiv 1804.02767 table 1) with cross-stage connections (arXiv 1911.11929)."""
    x = part.conv(None, 32, 3)
    x = _csp_stage(part, x, 64, blocks=1, branch=64)
    x = _csp_stage(part, x, 128, blocks=2, branch=64)
    c3 = _csp_stage(part, x, 256, blocks=8, branch=128)
    c4 = _csp_stage(part, c3, 512, blocks=8, branch=256)
    c5 = _csp_stage(part, c4, 1024, blocks=4, branch=512)
    return c3, c4, c5


def _csp_stage(part: _Part, x: Layer, filters: int, blocks: int, branch: int) -> Layer:
    """Appends a stage that halves the size. Only one branch has residual blocks."""
    x = part.conv(x, filters, 3, stride=2)
    around = part.conv(x, branch, 1)
    x = part.conv(x, branch, 1)
    for _ in range(blocks):
        residual = part.conv(x, filters // 2, 1)
        residual = part.conv(residual, branch, 3)
        x = part.add(residual, x)
    x = part.conv(x, branch, 1)
    return part.conv(part.concat(x, around), filters, 1)


def _spp(part: _Part, x: Layer) -> Layer:
    """Appends 3 convolutions, spatial pyramid pooling and 3 convolutions (arXiv 1903.08589 figure 2)."""
    x = _bottlenecks(part, x, 512, count=3)
    pooled = [part.max_pool(x, size, stride=1) for size in (5, 9, 13)]
    return _bottlenecks(part, part.concat(*reversed(pooled), x), 512, count=3)


def _top_down(part: _Part, coarse: Layer, fine: Layer, filters: int) -> Layer:
    """Appends a step of PANet's top-down path (arXiv 1803.01534 figure 1).

    The step concatenates its two inputs. PANet adds them.
    """
    coarse = part.upsample(part.conv(coarse, filters, 1))
    fine = part.conv(fine, filters, 1)
    return _bottlenecks(part, part.concat(fine, coarse), filters, count=5)


def _bottom_up(part: _Part, fine: Layer, coarse: Layer, filters: int) -> Layer:
    """Appends a step of PANet's bottom-up path (arXiv 1803.01534 figure 1).

    The step concatenates its two inputs. PANet adds them.
    """
    fine = part.conv(fine, filters, 3, stride=2)
    return _bottlenecks(part, part.concat(fine, coarse), filters, count=5)


def _bottlenecks(part: _Part, x: Layer, filters: int, count: int) -> Layer:
    """Appends `count` convolutions, in turn 1 x 1 and 3 x 3."""
    for i in range(count):
        x = part.conv(x, 2 * filters, 3) if i % 2 else part.conv(x, filters, 1)
    return x


def _yolov4_tiny(backbone: _Part, neck: _Part, head: _Part, outputs: int) -> None:
    """Appends YOLOv4-tiny: a CSP backbone (arXiv 2011.08036 section 3.3), a top-down path and two heads."""
    x = backbone.conv(None, 32, 3, stride=2)
    x = backbone.conv(x, 64, 3, stride=2)
    x, _ = _tiny_stage(backbone, x, 64)
    x, _ = _tiny_stage(backbone, x, 128)
    x, c4 = _tiny_stage(backbone, x, 256)
    c5 = backbone.conv(x, 512, 3)

    p5 = neck.conv(c5, 256, 1)
    head.predict(p5, 512, outputs, head=1)
    p4 = neck.upsample(neck.conv(p5, 128, 1))
    head.predict(neck.concat(p4, c4), 256, outputs, head=0)


def _yolov4_nano(backbone: _Part, neck: _Part, head: _Part, outputs: int) -> None:
    """Appends yolov4-nano, a tiny with three heads (cfg/yolov4-tiny-3l.cfg)."""
    x = backbone.conv(None, 32, 3, stride=2)
    x = backbone.conv(x, 64, 3, stride=2)
    x, _ = _tiny_stage(backbone, x, 64)
    x, c3 = _tiny_stage(backbone, x, 128)
    x, c4 = _tiny_stage(backbone, x, 192)
    c5 = backbone.conv(backbone.conv(x, 256, 1), 256, 3)

    p5 = neck.conv(c5, 128, 1)
    head.predict(p5, 192, outputs, head=2)
    p4 = neck.conv(neck.concat(neck.upsample(p5), c4), 128, 1)
    head.predict(p4, 192, outputs, head=1)
    p3 = neck.conv(neck.concat(neck.upsample(neck.conv(p4, 64, 1)), c3), 96, 1)
    head.predict(p3, 128, outputs, head=0)


def _tiny_stage(part: _Part, x: Layer, filters: int) -> tuple[Layer, Layer]:
    """Appends a CSP stage that halves the size. Returns its output, and its last convolution."""
    x = part.conv(x, filters, 3)
    first = part.conv(part.half(x), filters // 2, 3)
    second = part.conv(first, filters // 2, 3)
    feature = part.conv(part.concat(second, first), filters, 1)
    return part.max_pool(part.concat(x, feature), 2, stride=2), feature
