"""Annotations without errors: what is fixed or remarkable in them, and how the cache keeps them.

With the cache, the next start does not read the data again.
"""

import io
import json
from collections.abc import Callable

import numpy as np

from common.annotations import ARRAYS, Annotations
from common.issues import Findings
from common.labels import LabelMap

LARGE_ID = 2**31  # DALI takes smaller ones


def report_fixes(
    annotations: Annotations,
    name_image: Callable[[int], str],
    name_box: Callable[[int], str],
    findings: Findings,
) -> None:
    """Adds what is fixed and what is remarkable, or that no box can be used.

    Args:
        annotations: of at least one image, without errors.
        name_image: image i in words.
        name_box: box i and its image in words.
        findings: gets no-boxes, box-outside, box-empty, crowd, image-without-boxes and large-id.
    """
    boxes, is_clipped = annotations.clipped_boxes
    has_area = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
    is_crowd = annotations.is_crowd
    is_target = has_area & ~is_crowd
    if not is_target.any():
        findings.add("no-boxes", f"none of {len(boxes)} boxes is more than a crowd or an empty box")
    counts = np.bincount(annotations.box_image[is_target], minlength=annotations.num_images)
    for kind, which, name in (
        ("box-outside", is_target & is_clipped, name_box),
        ("box-empty", ~is_crowd & ~has_area, name_box),
        ("crowd", is_crowd, name_box),
        ("image-without-boxes", counts == 0, name_image),
        ("large-id", annotations.image_ids >= LARGE_ID, name_image),
    ):
        findings.add_each(kind, np.flatnonzero(which), name)
    for category in annotations.label_map.categories():
        if category["id"] >= LARGE_ID:
            findings.add("large-id", f"category {category['id']} ({category['name']!r})")


def pack(annotations: Annotations) -> bytes:
    """Everything but `origin`."""
    text = {
        "label_map": annotations.label_map.to_json(),
        "file_names": annotations.file_names,
        "findings": annotations.findings.to_json(),
    }
    stream = io.BytesIO()
    arrays = {name: getattr(annotations, name) for name in ARRAYS}
    np.savez(stream, text=np.frombuffer(json.dumps(text).encode(), np.uint8), **arrays)
    return stream.getvalue()


def unpack(content: bytes, origin: str) -> Annotations | None:
    """What `pack` gave, now read from `origin`; None where another version found other kinds of issues."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        text = json.loads(arrays["text"].tobytes())
        try:
            findings = Findings.from_json(origin, text["findings"])
        except KeyError:
            return None
        return Annotations(
            label_map=LabelMap.from_json(text["label_map"]),
            file_names=text["file_names"],
            origin=origin,
            findings=findings,
            **{name: arrays[name] for name in ARRAYS},
        )
