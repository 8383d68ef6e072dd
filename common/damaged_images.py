"""Why did the loader stop? DALI and tf.data say that an image cannot be decoded, but seldom which one."""

import concurrent.futures
import os
import pathlib
from collections.abc import Sequence

import PIL.Image

from common.errors import UserError
from common.sources import CocoSource, ImageListSource, Source

_SHOWN = 5  # files that the message names before it counts the rest
_PLAIN_TENSORFLOW = (".jpg", ".jpeg", ".png")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Finds the files that cannot be read, by decoding all of them again with Pillow.

    Args:
        error: what the loader raised.
        source: what it was reading.
        pipeline_type: who was reading.

    Returns:
        The error to raise: it names the files, or, where Pillow reads them all, says what the loader said.
    """
    files = _files(source)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reasons = list(pool.map(_fault, files))
    bad = [f"{file} ({reason})" for file, reason in zip(files, reasons, strict=True) if reason]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        return UserError(
            f"images that cannot be decoded: {', '.join(bad[:_SHOWN])}{more}. Replace or remove them"
        )
    others = [f for f in files if pathlib.PurePath(f).suffix.lower() not in _PLAIN_TENSORFLOW]
    if pipeline_type == "tensorflow" and others:
        return UserError(
            f"--pipeline_type=tensorflow reads JPEG and PNG, and {others[0]} may be neither: use dali_cpu"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "Error" in line or "rror when" in line), lines[0] if lines else "")
    return UserError(f"the loader ({pipeline_type}) stopped: {said}")


def _files(source: Source | None) -> Sequence[str]:
    if isinstance(source, CocoSource):
        return [os.path.join(source.images_dir, name) for name in source.annotations.file_names]
    if isinstance(source, ImageListSource):
        return source.files
    return []  # the images of TFRecords are no files


def _fault(file: str) -> str:
    try:
        with PIL.Image.open(file) as image:
            image.load()
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        return str(error).replace(f" '{file}'", "")
    return ""
