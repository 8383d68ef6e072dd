"""Reads and checks a COCO json of instances.

DALI's COCO reader accepts a truncated json, an unknown category or a missing key, and trains on the rest. So
DALI reads a json that readers.py writes from the result of `load_coco`. All errors are reported together with
the ids. The cache keeps an accepted json by the hash of its content: the next start does not decode it again.

Format: https://cocodataset.org/#format-data
"""

import dataclasses
import hashlib
import os

import numpy as np

from common.annotations import Annotations
from common.datacheck import checked_annotations, coco_checks, coco_columns, coco_parse
from common.datacheck.coco_columns import Images
from common.datacheck.image_files import check_files
from common.datacheck.images import ImagePolicy
from common.files import load_cached, save_cached
from common.issues import Findings

_VERSION = 4  # of the checks and of what is remembered: raise it when either changes


def load_coco(
    json_path: str | os.PathLike,
    images_dir: str | os.PathLike | None = None,
    *,
    policy: ImagePolicy = ImagePolicy(),
) -> Annotations:
    """Reads and checks a COCO json of instances.

    `area` (default: of the box), `iscrowd` (default: 0) and the annotations' `id` may be missing. Boxes that
    reach outside or have no area are accepted and noted; boxes with a negative side are not.

    Args:
        json_path: the annotations.
        images_dir: the directory that `file_name` refers to; None leaves the image files unchecked.
        policy: about images that cannot be used.

    Returns:
        The annotations; with on_bad_image="skip", of the usable images. Their `findings` list what was fixed,
        skipped or is remarkable.

    Raises:
        DataError: everything that would make training wrong, in the json and in the image files.
    """
    findings = Findings(os.fspath(json_path))
    content = coco_parse.read(findings.origin, findings)
    annotations, images = (None, None) if content is None else _decode(content, findings)
    del content
    usable = None
    if images_dir is not None and not os.path.isdir(images_dir):
        findings.add("no-image-directory", os.fspath(images_dir))
    elif images_dir is not None and images is not None:
        usable, _ = check_files(images_dir, images.file_names, images.sizes, images.name, policy, findings)
    if policy.on_bad_image == "skip":
        findings.skip_images()
        if annotations is not None and usable is not None:
            annotations = _select(annotations, usable)
    findings.raise_if_stopping()
    return annotations


def _decode(content: bytes, findings: Findings) -> tuple[Annotations | None, Images | None]:
    """The annotations, unless something stops, and the images as far as they are known."""
    name = f"coco-{hashlib.sha256(content).hexdigest()}-{_VERSION}.npz"
    saved = load_cached(name)
    annotations = None if saved is None else checked_annotations.unpack(saved, findings.origin)
    if annotations is not None:
        findings.extend(annotations.findings)
        annotations = dataclasses.replace(annotations, findings=findings)
        return annotations, Images(annotations.image_ids, annotations.file_names, annotations.image_sizes)
    records = coco_parse.cut(content, findings)
    if records is None:
        return None, None
    images, objects, categories = records["images"], records["annotations"], records["categories"]
    images = None if images is None else coco_columns.images_of(images, findings)
    objects = None if objects is None else coco_columns.objects_of(objects, findings)
    annotations = coco_checks.check(images, objects, categories, findings)
    if annotations is not None:
        save_cached(name, checked_annotations.pack(annotations))
    return annotations, images


def _select(annotations: Annotations, usable: np.ndarray) -> Annotations:
    """The annotations of usable images, with a finding where that leaves nothing."""
    selected = annotations.select(usable)
    if not selected.num_images:
        annotations.findings.add("no-images", f"none of {annotations.num_images} images can be used")
    elif not len(selected.target_boxes.boxes):
        annotations.findings.add("no-boxes", f"no box is in one of the {selected.num_images} usable images")
    return selected
