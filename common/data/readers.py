"""The first nodes of a DALI graph, which read encoded images and their boxes.

For the same images, `coco_reader` and `tfrecord_reader` return the same four nodes in the same units:

    jpegs       uint8 (bytes,): an encoded image, JPEG, PNG or any other format that DALI decodes
    boxes       float32 (N, 4), ltrb normalised, within [0, 1], each with a positive area; N may be 0
    labels      int32 (N,), 1-based: class + 1
    image_ids   int64 (), the original id

Crowds are left out. Boxes refer to the stored pixels, so decode with `adjust_orientation=False`.

Order of the images, as observed with DALI 2.4:

* Training: every epoch has a new permutation of the whole data set. Its seed is the same on all ranks. Rank r
  reads the r-th part of each permutation. A batch can span two epochs.
* TFRecords and other containers in training: the files are permuted, and the records are shuffled within a
  buffer of 1024. So write records in random order, as tools/convert.py does.
* Evaluation: each rank always reads the same part, in order, and repeats its last image until all ranks have
  the same number of batches.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math

from common.dali_ops import Nodes
from common.data.sharding import check_shards, order
from common.data.tfrecord import tfrecord_reader as tfrecord_reader
from common.files import get_or_create

if TYPE_CHECKING:
    from common.data.annotations import Annotations

_CLEAN_JSON = 1  # increase it when the json of clean_json changes


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
    """Reads image files with the annotations of `check.coco.load_coco`, inside a DALI graph.

    DALI reads a json made from the checked annotations. It is kept in the user's cache directory.

    Args:
        images_dir: the directory that the annotations' file names refer to.
        annotations: the annotations, checked against `images_dir`.
        training: if True, images are shuffled and repeat without end. If False, they are read in order. See
            the top of this file.
        shard_id: index of the part to read: of the replica in training, of the rank in evaluation.
        num_shards: number of parts: of replicas or ranks.
        seed: seed of the shuffling, the same for all shards; 0 is a valid seed.
        name: name of the DALI operator, for example for `pipeline.epoch_size(name)`.

    Returns:
        (jpegs, boxes, labels, image_ids), see the module docstring.

    Raises:
        UserError: there are fewer images than shards.
    """
    check_shards(annotations.num_images, num_shards)
    clean_name = f"{annotations.fingerprint()[:32]}-{_CLEAN_JSON}.coco.json"
    clean_file = get_or_create(clean_name, lambda: clean_json(annotations))
    jpegs, boxes, labels, rows = fn.readers.coco(  # type: ignore[misc]
        file_root=os.fspath(images_dir),
        annotations_file=os.fspath(clean_file),
        avoid_class_remapping=True,
        image_ids=True,
        ltrb=True,
        ratio=True,
        size_threshold=0.0,  # keeps boxes under 0.1 pixel
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        **order(training, seed),
    )
    # DALI's constants have 32 bits, so each int64 id is stored as two halves.
    halves = types.Constant(annotations.image_ids.view(np.int32).reshape(-1, 2), device="cpu")
    image_ids = fn.squeeze(fn.reinterpret(halves[rows[0]], dtype=types.INT64), axes=[0])
    return jpegs, dali_math.clamp(boxes, 0.0, 1.0), labels, image_ids


def file_reader(
    files: Sequence[str | os.PathLike], *, shard_id: int = 0, num_shards: int = 1, name: str = "reader"
) -> Nodes:
    """Reads image files without annotations, in order, inside a DALI graph; returns no boxes (N = 0).

    Args:
        files: paths of the images. The image ids are the positions in this list.
        shard_id, num_shards, name: as for `coco_reader`.

    Raises:
        UserError: there are fewer images than shards.
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


# Structs need a third of the memory that dictionaries need.
_Image = msgspec.defstruct("_Image", ["id", "file_name", "width", "height"], gc=False)
_Object = msgspec.defstruct("_Object", ["id", "image_id", "category_id", "bbox", "iscrowd"], gc=False)


def clean_json(annotations: "Annotations") -> bytes:
    """Returns the json that DALI reads. Equal annotations give equal bytes."""
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
