"""The first nodes of a DALI graph, which read encoded images and their boxes.

For the same images, `coco_reader`, `tfrecord_reader` and `webdataset_reader` return the same four nodes in
the same units:

    jpegs       uint8 (bytes,): an encoded image, JPEG, PNG or any other format that DALI decodes
    boxes       float32 (N, 4), ltrb normalised, within [0, 1], each with a positive area; N may be 0
    labels      int32 (N,), 1-based: class + 1
    image_ids   int64 (), the original id

Image files are read, not mapped into memory: if a mapped file shrinks, because it is written again in place,
SIGBUS ends the process. Reading took 1 % more CPU time per image of coco128 than mapping, decoding and
resizing included. Record files are mapped.

Crowds are left out. Boxes refer to the stored pixels, so decode with `adjust_orientation=False`.

Order of the images, as observed with DALI 2.4:

* Training: every epoch has a new permutation of the whole data set. Its seed is the same on all ranks. Rank r
  reads the r-th part of each permutation. A batch can span two epochs.
* TFRecords and WebDataset in training: DALI permutes the files, and draws images from a buffer of 1024. With
  shuffle="global" it gets many parts of the files in their place, see parts.py. With shuffle="buffer", the
  records in the files must be in random order, as tools/convert.py writes them.
* Evaluation: each rank always reads the same part, in order, and repeats its last image until all ranks have
  the same number of batches.
"""

import os
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math

from common.dali_ops import Nodes
from common.data.sharding import check_shards, order
from common.data.tfrecord import tfrecord_reader as tfrecord_reader
from common.data.webdataset import webdataset_reader as webdataset_reader
from common.files import cache_directory, get_or_create, user_errors, write_into

if TYPE_CHECKING:
    from common.data.annotations import Annotations

_CLEAN_JSON = 2  # increase it when the json of clean_json changes
_DALI_FILES = 1  # increase it when the files of write_dali_files change
_SPACE = re.compile(r"[ \t\n\v\f\r]")  # what ends a file name in DALI's filenames.dat


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
    """Reads image files with the annotations of `coco.load_coco`, inside a DALI graph.

    DALI reads arrays made from the checked annotations. They are kept in the user's cache directory.

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
    jpegs, boxes, labels, rows = fn.readers.coco(  # type: ignore[misc]
        file_root=os.fspath(images_dir),
        avoid_class_remapping=True,
        image_ids=True,
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        dont_use_mmap=True,
        **_annotations_for_dali(annotations),
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
        dont_use_mmap=True,
        **order(training=False, seed=0),
    )
    boxes = fn.zeros(shape=[0, 4], dtype=types.FLOAT)
    labels = fn.zeros(shape=[0], dtype=types.INT32)
    return jpegs, boxes, labels, fn.cast(positions[0], dtype=types.INT64)


# --- the files that DALI reads ---


def _annotations_for_dali(annotations: "Annotations") -> dict[str, Any]:
    """Writes the annotations to the cache; returns the arguments of `fn.readers.coco` to read them."""
    key = annotations.fingerprint()[:32]
    if any(map(_SPACE.search, annotations.file_names)):
        clean_file = get_or_create(f"{key}-{_CLEAN_JSON}.coco.json", lambda: clean_json(annotations))
        # The threshold keeps boxes under 0.1 pixel.
        return {"annotations_file": os.fspath(clean_file), "ltrb": True, "ratio": True, "size_threshold": 0.0}
    directory = cache_directory() / f"{key}-{_DALI_FILES}.coco"
    if not (directory / LAST_FILE).exists():
        with user_errors(f"cannot write {directory} (to use another directory, set XDG_CACHE_HOME)"):
            directory.mkdir(exist_ok=True)
            write_into(directory, lambda staged: write_dali_files(staged, annotations))
    return {"preprocessed_annotations": os.fspath(directory)}


LAST_FILE = "original_ids.dat"  # of write_dali_files, in the order of their names


def write_dali_files(directory: pathlib.Path, annotations: "Annotations") -> None:
    """Writes the files that `save_preprocessed_annotations` of `fn.readers.coco` would write.

    DALI reads them faster than a json, and needs less memory. But it cannot read a file name with a space:
    then it reads `clean_json`, whose boxes are ltwh in pixels, and normalises these in float32
    (dali/operators/reader/loader/coco_loader.cc). This function does the same arithmetic, so that a space in
    a file name changes no bit of a box. An array is stored after its length, uint32.
    """
    targets = annotations.target_boxes
    left_top, sides = np.split(_target_boxes_ltwh_px(annotations), 2, axis=1)
    sizes = np.repeat(annotations.image_sizes, np.diff(targets.row_splits), axis=0)  # (M, 2) height, width
    boxes = np.concatenate([left_top, left_top + sides], axis=1) / sizes[:, [1, 0, 1, 0]].astype(np.float32)
    arrays: dict[str, np.ndarray] = {
        "boxes": boxes.ravel(),
        "counts": np.diff(targets.row_splits).astype(np.int32),
        "labels": targets.classes.astype(np.int32) + 1,
        "offsets": targets.row_splits[:-1].astype(np.int32),
        "original_ids": np.arange(annotations.num_images, dtype=np.int32),
    }
    for name, array in arrays.items():
        with open(directory / f"{name}.dat", "wb") as stream:
            stream.write(np.uint32(len(array)).tobytes())
            stream.write(array.data)
    names = "".join(f"{name}\n" for name in annotations.file_names)
    (directory / "filenames.dat").write_bytes(os.fsencode(names))


# Structs need a third of the memory that dictionaries need.
_Image = msgspec.defstruct("_Image", ["id", "file_name", "width", "height"], gc=False)
_Object = msgspec.defstruct("_Object", ["id", "image_id", "category_id", "bbox", "iscrowd"], gc=False)


def clean_json(annotations: "Annotations") -> bytes:
    """Returns the json that DALI reads. Equal annotations give equal bytes."""
    targets = annotations.target_boxes
    sizes = annotations.image_sizes
    row = np.repeat(np.arange(annotations.num_images), np.diff(targets.row_splits))
    boxes_ltwh_px = _target_boxes_ltwh_px(annotations)
    names = enumerate(zip(annotations.file_names, sizes.tolist(), strict=True))
    objects = zip(row.tolist(), (targets.classes + 1).tolist(), boxes_ltwh_px.tolist(), strict=True)
    return msgspec.json.encode(
        {
            "images": [_Image(i, name, width, height) for i, (name, (height, width)) in names],
            "annotations": [_Object(i, *of_box, iscrowd=0) for i, of_box in enumerate(objects, 1)],
            "categories": [{"id": i, "name": name} for i, name in enumerate(annotations.label_map.names, 1)],
        }
    )


def _target_boxes_ltwh_px(annotations: "Annotations") -> np.ndarray:
    """Returns the boxes for training in pixels, float32 (M, 4), as `clean_json` holds them."""
    targets = annotations.target_boxes
    sizes = np.repeat(annotations.image_sizes, np.diff(targets.row_splits), axis=0)
    scale = sizes[:, ::-1].astype(np.float64)  # (M, 2) width, height
    left_top = targets.boxes[:, :2] * scale
    sides = targets.boxes[:, 2:] * scale - left_top
    return np.concatenate([left_top, sides], axis=1).astype(np.float32)
