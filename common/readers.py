"""The first nodes of a DALI graph: encoded images with their boxes.

`coco_reader` and `tfrecord_reader` return the same four nodes, in the same units, from the same images:

    jpegs       uint8 (bytes,): an encoded image, JPEG, PNG or any other format that DALI decodes
    boxes       float32 (N, 4), ltrb normalised, within [0, 1], each with some area; N may be 0
    labels      int32 (N,), 1-based: class + 1
    image_ids   int64 (), the original ids, of any size

Crowds are never targets: they belong to the ground truth for pycocotools (`Annotations.ground_truth`).
tools/preprocessing/image_source.py has readers for images without boxes.

Boxes refer to the stored pixels, so decode with `adjust_orientation=False`: turning an image by its EXIF
tag would leave its boxes behind.

Order, as observed with DALI 2.4:

* Training: the whole set is permuted anew for every epoch, the first one included, by a seed that is the
  same on all ranks; rank r reads the r-th part of each permutation. Parts are disjoint and together
  complete. A part is one image longer on some ranks if the ranks do not divide the size, and a rank's next
  epoch begins when its own part is read: batches cross epochs, and ranks with the shorter part run slowly
  ahead.
* TFRecords and the other containers are permuted by file, and within a buffer of 1024 records: write them
  shuffled (tools/convert.py does).
* Evaluation: each rank reads its own part in order, always the same, and repeats its last image until all
  ranks have the same number of batches: every image exactly once after dropping repeated ids.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math

from common.dali_ops import Nodes, check_shards, order
from common.files import get_or_create
from common.tfrecord import tfrecord_reader as tfrecord_reader

if TYPE_CHECKING:
    from common.annotations import Annotations

_CLEAN_JSON = 1  # version of the json that _clean_json makes: raise it when that changes


def coco_reader(
    images_dir: str | os.PathLike,
    annotations: "Annotations",
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    name: str = "reader",
) -> Nodes:
    """Reads image files with the annotations of `datacheck.coco.load_coco`, inside a DALI graph.

    DALI does not read the user's json but one written from the checked annotations: images numbered in the
    order of the file (DALI refuses ids above 2**31), labels, clipped boxes, no crowds. It is kept in the
    user's cache directory.

    Args:
        images_dir: the directory that the annotations' file names refer to.
        annotations: checked against that directory.
        training: shuffled without end, or in order (module docstring).
        shard_id: the part to read, the rank.
        num_shards: number of parts, the number of ranks.
        seed: of the shuffling, the same on all ranks; 0 is a valid seed.
        name: of the DALI operator; `pipeline.epoch_size(name)` uses it.

    Returns:
        (jpegs, boxes, labels, image_ids), see the module docstring.

    Raises:
        UserError: fewer images than shards.
    """
    check_shards(annotations.num_images, num_shards)
    clean_name = f"{annotations.fingerprint()[:32]}-{_CLEAN_JSON}.coco.json"
    clean_json = get_or_create(clean_name, lambda: _clean_json(annotations))
    # DALI's stubs do not know how many nodes a reader returns.
    jpegs, boxes, labels, rows = fn.readers.coco(  # type: ignore[misc]
        file_root=os.fspath(images_dir),
        annotations_file=os.fspath(clean_json),
        avoid_class_remapping=True,  # otherwise labels follow the order of `categories`
        image_ids=True,
        ltrb=True,
        ratio=True,
        size_threshold=0.0,  # boxes under 0.1 pixel would vanish here and stay in TFRecords
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        **order(training, seed),
    )
    # DALI's constants are 32-bit: each id travels as two halves.
    halves = types.Constant(annotations.image_ids.view(np.int32).reshape(-1, 2), device="cpu")
    image_ids = fn.squeeze(fn.reinterpret(halves[rows[0]], dtype=types.INT64), axes=[0])
    return jpegs, dali_math.clamp(boxes, 0.0, 1.0), labels, image_ids


def file_reader(
    files: Sequence[str | os.PathLike], *, shard_id: int = 0, num_shards: int = 1, name: str = "reader"
) -> Nodes:
    """Reads image files without annotations, in order, inside a DALI graph; N = 0 boxes.

    Args:
        files: their positions in this list, from 0, are the image ids.
        shard_id, num_shards, name: as for `coco_reader`.

    Raises:
        UserError: fewer images than shards.
    """
    check_shards(len(files), num_shards)
    jpegs, positions = fn.readers.file(
        files=[os.path.abspath(file) for file in files],
        labels=list(range(len(files))),
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        **order(training=False, seed=0),
    )
    boxes = fn.zeros(shape=[0, 4], dtype=types.FLOAT)
    labels = fn.zeros(shape=[0], dtype=types.INT32)
    return jpegs, boxes, labels, fn.cast(positions[0], dtype=types.INT64)


# Structs take a third of the memory of dictionaries.
_Image = msgspec.defstruct("_Image", ["id", "file_name", "width", "height"], gc=False)
_Object = msgspec.defstruct("_Object", ["id", "image_id", "category_id", "bbox", "iscrowd"], gc=False)


def _clean_json(annotations: "Annotations") -> bytes:
    """The json that DALI reads. Equal annotations give equal bytes."""
    targets = annotations.target_boxes
    sizes = annotations.image_sizes
    row = np.repeat(np.arange(annotations.num_images), np.diff(targets.row_splits))
    scale = sizes[row][:, [1, 0]].astype(np.float64)  # (M, 2) width, height
    left_top = targets.boxes[:, :2] * scale
    boxes_ltwh_px = np.concatenate([left_top, targets.boxes[:, 2:] * scale - left_top], axis=1)
    names = enumerate(zip(annotations.file_names, sizes.tolist(), strict=True))
    objects = zip(row.tolist(), (targets.classes + 1).tolist(), boxes_ltwh_px.tolist(), strict=True)
    return msgspec.json.encode(
        {
            "images": [_Image(i, name, width, height) for i, (name, (height, width)) in names],
            "annotations": [_Object(i, *of_box, iscrowd=0) for i, of_box in enumerate(objects, 1)],
            "categories": [{"id": i, "name": name} for i, name in enumerate(annotations.label_map.names, 1)],
        }
    )
