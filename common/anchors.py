"""Anchors of a feature pyramid: at each cell of each level, one box per scale and aspect ratio.

RetinaNet (arXiv 1708.02002, section 4) and EfficientDet (arXiv 1911.09070) use anchors. Their order and
coordinates are those of google/automl (efficientdet/tf2/anchors.py, Anchors).
"""

import dataclasses
import functools

import numpy as np

MATCH_IOU = 0.5  # google/automl efficientdet/tf2/anchors.py AnchorLabeler: match_threshold
MAX_INSTANCES = 100  # google/automl efficientdet/hparams_config.py: max_instances_per_image


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The anchors of one model at one image size. The object is hashable; its arrays are read-only.

    Level l has `ceil(height / 2**l) x ceil(width / 2**l)` cells. Its stride is the image side divided by the
    number of cells. Anchors are not clipped to the image.

    Attributes:
        min_level: first pyramid level.
        max_level: last pyramid level; it is included.
        num_scales: number of scales per octave. For n scales, the factors are
            `2**0, 2**(1/n), ..., 2**((n-1)/n)`.
        aspect_ratios: width / height of the anchors. Anchors of all ratios have the same area.
        anchor_scale: side of a level's smallest square anchor, as a multiple of the level's stride.
        image_size: (height, width) of the network input in pixels.
    """

    min_level: int
    max_level: int
    num_scales: int
    aspect_ratios: tuple[float, ...]
    anchor_scale: float
    image_size: tuple[int, int]

    def __post_init__(self) -> None:
        # Converts lists to tuples, which keeps the object hashable.
        object.__setattr__(self, "aspect_ratios", tuple(float(ratio) for ratio in self.aspect_ratios))
        object.__setattr__(self, "image_size", tuple(int(side) for side in self.image_size))
        sizes = (self.num_scales, self.anchor_scale, *self.aspect_ratios, *self.image_size)
        is_complete = self.aspect_ratios and len(self.image_size) == 2
        if not (0 <= self.min_level <= self.max_level and is_complete and min(sizes) > 0):
            raise ValueError(f"{self}: need 0 <= min_level <= max_level, and all other numbers above 0")

    @property
    def levels(self) -> range:
        return range(self.min_level, self.max_level + 1)

    @property
    def feature_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each level's feature map."""
        height, width = self.image_size
        return tuple((-(-height // 2**level), -(-width // 2**level)) for level in self.levels)

    @property
    def anchors_per_location(self) -> int:
        return self.num_scales * len(self.aspect_ratios)

    @property
    def num_anchors(self) -> int:
        """A, the number of anchors of all levels."""
        return sum(height * width for height, width in self.feature_sizes) * self.anchors_per_location

    @functools.cached_property
    def boxes(self) -> np.ndarray:
        """All anchors, float32 (A, 4) tlbr in input pixels.

        They are sorted by level, row, column, scale and aspect ratio.
        """
        boxes = np.concatenate([self._boxes_tlbr_px(*size) for size in self.feature_sizes]).astype(np.float32)
        boxes.setflags(write=False)
        return boxes

    @functools.cached_property
    def boxes_normalized(self) -> np.ndarray:
        """float32 (A, 4), ltrb divided by the image size."""
        height, width = self.image_size
        boxes = self.boxes[:, [1, 0, 3, 2]] / np.array([width, height, width, height], np.float32)
        boxes.setflags(write=False)
        return boxes

    def _boxes_tlbr_px(self, feature_height: int, feature_width: int) -> np.ndarray:
        """Returns one level's anchors, float64 (N, 4), in the order of `boxes`."""
        stride = np.array(self.image_size) / (feature_height, feature_width)  # (y, x)
        octaves = 2.0 ** (np.arange(self.num_scales) / self.num_scales)
        ratios = np.sqrt(self.aspect_ratios)
        base = self.anchor_scale * stride * octaves[:, np.newaxis]  # (scale, yx)
        widths = base[:, np.newaxis, 1] * ratios  # (scale, ratio)
        heights = base[:, np.newaxis, 0] / ratios
        half_sizes = np.stack([heights, widths], axis=-1).reshape(1, 1, -1, 2) / 2  # (1, 1, k, yx)

        rows = (np.arange(feature_height) + 0.5) * stride[0]
        columns = (np.arange(feature_width) + 0.5) * stride[1]
        centers = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1)[:, :, np.newaxis]
        return np.concatenate([centers - half_sizes, centers + half_sizes], axis=-1).reshape(-1, 4)
