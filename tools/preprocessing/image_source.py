"""Opens the images that --source and --input name, and checks all of them.

source = open_image_source("files", "photos")
images, labels = Part(source).in_graph()               # in a pipeline
for images, labels in Part(source).in_dynamic(32):     # in the Dynamic API
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from common.args import ImagePolicy
from common.data.check import images as images_lib
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import Issues
from common.data.open import log_issues
from common.errors import UserError, unknown
from tools.preprocessing.formats import containers, external, files, lmdb_images
from tools.preprocessing.formats.base import ARRAYS, ImageSource, Opening

KINDS = {
    "files": files.open_files,
    "list": files.open_list,
    "tfrecord": containers.open_tfrecord,
    "coco": files.open_coco,
    "external": external.open_external,
    "lmdb": lmdb_images.open_lmdb,
    "recordio": containers.open_recordio,
    "webdataset": containers.open_webdataset,
    "numpy": files.open_numpy,
}


def open_image_source(
    kind: str,
    path: str,
    *,
    policy: ImagePolicy = ImagePolicy(),
    annotations: str | None = None,
    images: str | None = None,
    on_report: Callable[[Issues], None] = log_issues,
) -> ImageSource:
    """Opens a source and checks all its images.

    Args:
        path: the value of --input: a path, a glob, or a Python name.
        annotations: only for the kind "coco", if `path` is the directory of the images: the json.
        images: only for the kind "coco", if `path` is the json: the directory of the images.
        on_report: function that is called with the issues that were found.

    Raises:
        UserError: the kind is unknown, or the input does not exist or cannot be read.
        DataError: an image cannot be used and the policy is to stop; or no image can be used.
    """
    if kind not in KINDS:
        raise unknown("source", kind, KINDS)
    if kind != "coco" and (annotations or images):
        raise UserError(f"--annotations and --images are for --source=coco, not for --source={kind}")
    opening = Opening(path, policy, annotations, images, Issues(path, policy), {})
    try:
        content = KINDS[kind](opening)
        found = [(image, name, _inspect(encoded, policy)) for image, name, encoded in content.images]
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}") from error
    issues = opening.issues
    kept = [image for image, name, facts in found if not images_lib.add_fault(facts, name, issues)]
    if not kept and not issues.stopping:
        issues.add("no-images", f"none of {len(found)} can be read")
    issues.raise_if_stopping()
    on_report(issues)
    forms = {image.form if image.form in ARRAYS else "encoded": image.name for image in kept}
    if len(forms) > 1:
        listed = " and ".join(f"{name!r} is {form}" for form, name in forms.items())
        raise UserError(f"{path}: {listed}: give only encoded images, or only arrays of one dtype")
    labelled = {image.label is not None for image in kept}
    # DALI misreads images if only some have labels, or if a file name is not UTF-8.
    can_read = len(labelled) == 1 and all(image.file.isprintable() for image in kept)
    reader = content.make_reader(kept, labelled.pop()) if can_read else None
    return ImageSource(kind, kept, content, reader, opening.label_names, "encoded" not in forms)


def _inspect(content: Any, policy: ImagePolicy) -> ImageFacts:
    if isinstance(content, ImageFacts):
        return content
    if isinstance(content, np.ndarray) and content.ndim == 3:
        return images_lib.limited(ImageFacts("array", *content.shape[:2]), policy.max_megapixels)
    return images_lib.inspect(memoryview(content), policy)
