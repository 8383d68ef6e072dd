"""Samples as PNG or JPEG."""

import dataclasses
import io

import numpy as np
from PIL import Image

from common.errors import UserError
from tools.preprocessing.output_sample import Sample, describe, layout_of

IMAGE_FORMATS = ("png", "jpeg")
JPEG_QUALITY = 95
_SUFFIXES = {"png": ".png", "jpeg": ".jpg"}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How an image becomes a file.

    Attributes:
        image_format: of IMAGE_FORMATS.
        jpeg_quality: Pillow's, 1 to 100.
        is_bgr: three channels are blue, green, red; in files they are red, green, blue.
    """

    image_format: str = IMAGE_FORMATS[0]
    jpeg_quality: int = JPEG_QUALITY
    is_bgr: bool = False

    @property
    def suffix(self) -> str:
        return _SUFFIXES[self.image_format]

    def picture(self, sample: Sample) -> np.ndarray:
        """The image as a file format takes it: uint8 (H, W, 3) RGB or (H, W), contiguous.

        Raises:
            UserError: it has another dtype, or another layout or number of channels.
        """
        image = sample.image
        if image.dtype != np.uint8:
            raise UserError(
                f"{describe(sample)}, and pictures are uint8: leave crop_mirror_normalize and cast out of"
                " --ops, or write an .npz"
            )
        if layout_of(sample) == "CHW":
            raise UserError(
                f"{describe(sample)}, and pictures have their channels last: leave layout:CHW out of --ops,"
                " or write an .npz"
            )
        channels = image.shape[2] if image.ndim == 3 else 1 if image.ndim == 2 else 0
        if channels not in (1, 3) or not image.size:
            raise UserError(
                f"{describe(sample)}, and pictures are height x width x 3 or 1, not empty: change --ops,"
                " or write an .npz"
            )
        if channels == 1:
            image = image.reshape(image.shape[:2])
        elif self.is_bgr:
            image = image[..., ::-1]
        return np.ascontiguousarray(image)

    def encode(self, picture: np.ndarray) -> bytes:
        """uint8 (H, W, 3) RGB or (H, W) -> a file's content."""
        stream = io.BytesIO()
        options = {"quality": self.jpeg_quality} if self.image_format == "jpeg" else {}
        Image.fromarray(picture).save(stream, self.image_format, **options)
        return stream.getvalue()
