"""An encoded image as a parser sees it: its bytes, what its header says, and what is wrong with it."""

import dataclasses
import functools
from collections.abc import Callable

_HEAD = 8192  # bytes that are read at once: most headers end within them


class Fault(Exception):  # noqa: N818 (what was found, not what went wrong here)
    """Why an image cannot be used.

    Attributes:
        kind: of findings.KINDS.
        detail: in words, to stand behind the name of the file and a colon.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


damaged = functools.partial(Fault, "image-damaged")
truncated = functools.partial(Fault, "image-truncated")
unsupported = functools.partial(Fault, "unsupported-format")


@dataclasses.dataclass(slots=True)
class Header:
    """What was found, as far as the parser came.

    Attributes:
        image_format: Pillow's name of the format.
        height, width: of the stored pixels.
        orientation: of EXIF or TIFF, 1 to 8.
        is_16_bit: samples are 16 bits wide, and DALI keeps the upper eight.
        pixels_at: where the data of the first scan (JPEG) or the pixels (PNM) begin.
    """

    image_format: str = ""
    height: int = 0
    width: int = 0
    orientation: int = 1
    is_16_bit: bool = False
    pixels_at: int = 0


class Encoded:
    """The bytes of an image, of which as few as possible are read.

    Args:
        size: their number.
        read: gives `count` bytes from `offset` on, fewer at the end.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes]):
        self.size = size
        self._read = read
        self.head = read(0, min(size, _HEAD))

    @classmethod
    def of(cls, content: bytes | memoryview) -> "Encoded":
        """Of bytes in memory."""
        return cls(len(content), lambda offset, count: bytes(content[offset : offset + count]))

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; Fault where there are not so many."""
        end = offset + count
        if end <= len(self.head):
            return self.head[offset:end]
        content = self._read(offset, count) if end <= self.size else b""
        if len(content) < count:
            raise truncated(f"it ends after {self.size} bytes, and byte {end - 1} is needed")
        return content

    def whole(self) -> bytes:
        """All bytes."""
        return self.at(0, self.size)
