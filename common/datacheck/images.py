"""Checks encoded images before anything decodes them: format, size, orientation, whether DALI can use them.

A check reads the header and the end (image_headers.py); on demand, and always of 16-bit images, every pixel
(image_pixels.py).
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from common.args import MAX_MEGAPIXELS
from common.datacheck.image_headers import Encoded, Fault, Header, read_header
from common.datacheck.image_pixels import check_pixels
from common.errors import UserError
from common.issues import Findings

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2")


@dataclasses.dataclass(frozen=True)
class ImagePolicy:
    """What is done about images that cannot be used.

    Attributes:
        on_bad_image: "stop", or "skip": unreadable images are left out and reported.
        max_megapixels: larger images count as unreadable (a 48 KB PNG can decode to 3.3 GB).
        decode: look at every pixel, not just at headers and ends of files.
    """

    on_bad_image: str = "stop"
    max_megapixels: float = MAX_MEGAPIXELS
    decode: bool = False

    def __post_init__(self) -> None:
        if not self.max_megapixels > 0:
            raise UserError(f"--max_megapixels={self.max_megapixels:g}: it must be above 0")


class ImageFacts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the header and the end of an image file say.

    Attributes:
        image_format: Pillow's name of it, "JPEG" for files with several pictures, too; "" where unknown.
        height, width: of the stored pixels, before any EXIF turn; 0 where unknown.
        orientation: of EXIF, 1 to 8; 1 where there is none.
        fault: a row of issues.KINDS (severity IMAGE); "" where there is none.
        detail: of the fault, in words.
    """

    image_format: str = ""
    height: int = 0
    width: int = 0
    orientation: int = 1
    fault: str = ""
    detail: str = ""

    def add_fault(self, name: str, findings: Findings) -> bool:
        """Adds the fault, if there is one, of an image with this name; returns whether there is one."""
        if self.fault:
            findings.add(self.fault, f"{name}: {self.detail}" if self.detail else name)
        return bool(self.fault)


def path_fault(name: str) -> bool:
    """Whether a file name leaves the image directory, or cannot stand in a list of files: absolute, with
    `..`, a NUL or a line feed."""
    return name.startswith("/") or "\0" in name or "\n" in name or (".." in name and ".." in name.split("/"))


def inspect(
    encoded: bytes | memoryview, *, decode: bool = False, max_megapixels: float = MAX_MEGAPIXELS
) -> ImageFacts:
    """Looks at an encoded image in memory.

    Args:
        encoded: the image.
        decode: look at every pixel. A JPEG has no checksum, so even that does not find all damage: see
            image_pixels.py.
        max_megapixels: a larger image is at fault, and not decoded.
    """
    return inspect_encoded(Encoded.of(encoded), decode, max_megapixels)


def check_images(
    facts: Sequence[ImageFacts],
    image_sizes: np.ndarray,
    names: Sequence[str],
    describe: Callable[[int], str],
    findings: Findings,
) -> np.ndarray:
    """Compares images with what annotations say of them.

    Args:
        facts: of I images.
        image_sizes: (I, 2), (height, width) according to the annotations; 0 where they have none.
        names: their file names; "" where there is none.
        describe: gives the name of image i in messages: `image 12 ('a.jpg')`.
        findings: gets what is at fault or remarkable.

    Returns:
        bool (I,), which images can be decoded.
    """
    usable = np.ones(len(facts), np.bool_)
    for i, (fact, size, name) in enumerate(zip(facts, image_sizes.tolist(), names, strict=True)):
        if fact.add_fault(describe(i), findings):
            usable[i] = False
            continue
        stored = [fact.height, fact.width]
        size = [given or found for given, found in zip(size, stored, strict=True)]
        if size != stored:
            turned = fact.orientation in _SWAPS_SIDES and size == stored[::-1]
            findings.add(
                "image-turned" if turned else "image-size-differs",
                f"{describe(i)} is {fact.width} x {fact.height} pixels, the annotations say"
                f" {size[1]} x {size[0]}",
            )
        elif fact.orientation != 1:
            findings.add("exif-turn", f"{describe(i)} has EXIF orientation {fact.orientation}")
        suffix = name.rpartition(".")[2].lower() if "." in name else ""
        if _FORMAT_OF.get(suffix, fact.image_format) != fact.image_format:
            findings.add("wrong-extension", f"{describe(i)} is {fact.image_format}")
    return usable


_SWAPS_SIDES = (5, 6, 7, 8)  # EXIF orientations
_SUFFIXES = {
    "JPEG": "jpg jpeg jpe jfif mpo",
    "PNG": "png apng",
    "WEBP": "webp",
    "BMP": "bmp dib",
    "TIFF": "tif tiff",
    "JPEG2000": "jp2 j2k j2c jpc jpf jpx jph",
    "PPM": "ppm pgm pbm pnm",
    "GIF": "gif",
    "AVIF": "avif",
    "HEIF": "heic heif",
}
_FORMAT_OF = {suffix: image_format for image_format, of in _SUFFIXES.items() for suffix in of.split()}


# --- one image ---


def inspect_encoded(encoded: Encoded, decode: bool, max_megapixels: float) -> ImageFacts:
    """`inspect` of an image of which as few bytes as possible are read."""
    header, fault = Header(), None
    try:
        read_header(encoded, header)
        if (decode or header.is_16_bit) and header.height * header.width <= max_megapixels * 1e6:
            check_pixels(encoded.whole(), header, decode=decode)
    except Fault as found:
        fault = found
    if max(header.height, header.width) >= 2**31:
        fault = fault or Fault("image-damaged", f"{header.width} x {header.height} pixels")
        header.height = header.width = 0
    facts = ImageFacts(header.image_format, header.height, header.width, header.orientation)
    if fault:
        facts = msgspec.structs.replace(facts, fault=fault.kind, detail=fault.detail)
    return limited(facts, max_megapixels)


def limited(facts: ImageFacts, max_megapixels: float) -> ImageFacts:
    """The facts, at fault where the image is too large."""
    megapixels = facts.height * facts.width / 1e6
    if facts.fault or megapixels <= max_megapixels:
        return facts
    detail = f"{facts.width} x {facts.height} pixels are {megapixels:.4g} megapixels, the limit is"
    return msgspec.structs.replace(facts, fault="image-too-large", detail=f"{detail} {max_megapixels:g}")
