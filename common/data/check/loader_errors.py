"""Finds the images or objects behind an error of a loader: DALI and TensorFlow often do not name the file."""

import functools
import math
import re

from common.args import ImagePolicy
from common.data import storage
from common.data.check.image_headers import ImageFacts
from common.data.check.images import DECODERS, add_fault, in_threads, inspect
from common.data.check.issues import DataError, Issues
from common.data.sources import Source
from common.data.storage import Stat, StoreError
from common.errors import UserError, tell

_TENSORFLOW_FORMATS = ("JPEG", "PNG")
_REQUESTS = 16  # at once
# DALI 2.4 repeats a request after an error or an incomplete answer, but does not empty its buffer before
# (read_object_contents in dali/util/s3_filesystem.cc). So the repetition fails, too, with one of these lines.
_UNKNOWN = ("Current pipeline", "Failed to flush response stream", "SlowDown")
_ANSWER = "the store was busy, or cut an answer off; DALI cannot repeat such a request"


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
        for begin in range(0, len(source.objects), _REQUESTS):
            for problem in in_threads(_refusal, source.objects[begin : begin + _REQUESTS], _REQUESTS):
                if problem:
                    return problem
        timeout = re.search(r"curlCode: \d+, ([^\n;]*)", text)
        reason = timeout[1] if timeout else _ANSWER if match[1].startswith(_UNKNOWN) else match[1].rstrip(":")
        folder = source.objects[0].path.rpartition("/")[0]
        advice = "Now all objects can be read: run the same command again, which resumes the run"
        return UserError(f"the loader ({pipeline_type}) could not read from {folder}: {reason}. {advice}")
    return None


def _refusal(stored: Stat) -> UserError | None:
    """Returns the error of a request for one byte of an object; None if the store answers."""
    try:
        storage.read(stored.path, 0, 1)
    except StoreError as error:
        return error
    return None


def _decode(source: Source, row: int) -> ImageFacts:
    try:
        return inspect(source.encoded(row), ImagePolicy(decode=True, max_megapixels=math.inf))
    except FileNotFoundError:
        return ImageFacts(fault="image-missing")
    except Exception as error:  # for example, the file has changed since the start
        return ImageFacts(fault="image-unreadable", detail=str(error))
