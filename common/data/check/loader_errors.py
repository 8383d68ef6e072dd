"""Finds the images or objects behind an error of a loader: DALI and TensorFlow often do not name the file."""

import functools
import math
import re

from common.args import ImagePolicy
from common.data.check.image_headers import ImageFacts
from common.data.check.images import DECODERS, add_fault, in_threads, inspect
from common.data.check.issues import DataError, Issues
from common.data.sources import Source
from common.errors import UserError, tell

_TENSORFLOW_FORMATS = ("JPEG", "PNG")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Logs the error of a loader, then decodes all images to find those that caused it.

    If a bucket is the cause, returns its error instead.

    Args:
        pipeline_type: the loader's type, for example dali_cpu.

    Returns:
        The error to raise. It names the images that cannot be read; if all images can be decoded, it has the
        most helpful line of the loader's own error.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    reason = next((line for line in lines if "Error" in line or "rror when" in line), lines[0])
    stopped = UserError(f"the loader ({pipeline_type}) stopped: {reason}")
    if source is None or source.name == "video":
        return stopped
    if problem := _problem_of_store(str(error), source, pipeline_type):
        return problem
    tell(f"{stopped}\nDecoding the images to find the damaged ones; press Ctrl-C if that takes too long")
    issues = Issues(source.annotations.origin)
    others = []  # names and formats of images that TensorFlow cannot decode
    for row, facts in enumerate(in_threads(functools.partial(_decode, source), range(source.size), DECODERS)):
        name = source.image_name(row)
        if not add_fault(facts, name, issues) and facts.image_format not in _TENSORFLOW_FORMATS:
            others.append(f"{name} is {facts.image_format}")
    if issues.stopping:
        return DataError(issues)
    if pipeline_type == "tensorflow" and others:
        return UserError(f"--pipeline_type=tensorflow reads only JPEG and PNG, but {others[0]}: use dali_cpu")
    return stopped


def _problem_of_store(text: str, source: Source, pipeline_type: str) -> UserError | None:
    """Returns the reason if a bucket is behind an error of a loader; None if not, or if it is unknown."""
    if not source.objects:
        return None
    try:
        source.check_unchanged(strict=True)
    except UserError as error:
        return error
    if match := re.search("StoreError: (.*)", text):  # of storage.py, in a loader of TensorFlow
        return UserError(match[1])
    if match := re.search(r"`nvidia\.dali\.fn\.readers\..*?encountered:[\s:]*([^\n]*)", text, re.DOTALL):
        folder = source.objects[0].path.rpartition("/")[0]
        reason = match[1] if "Current pipeline" not in match[1] else "it gives no reason"
        advice = "The objects have not changed: run the same command again"
        return UserError(f"the loader ({pipeline_type}) could not read from {folder}: {reason}. {advice}")
    return None


def _decode(source: Source, row: int) -> ImageFacts:
    try:
        return inspect(source.encoded(row), ImagePolicy(decode=True, max_megapixels=math.inf))
    except FileNotFoundError:
        return ImageFacts(fault="image-missing")
    except Exception as error:  # for example, the file has changed since the start
        return ImageFacts(fault="image-unreadable", detail=str(error))
