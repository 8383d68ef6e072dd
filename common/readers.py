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
import nvidia.dali.tfrecord as dali_tfrecord
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import box_encoder, tfrecord
from common.errors import UserError
from common.files import get_or_create
from common.labels import LabelMap
from common.tfrecord import BOX_KEYS, CROWD_KEY, LABEL_KEY, Records

if TYPE_CHECKING:
    from common.annotations import Annotations

SHUFFLE_BUFFER = 1024  # encoded images that each rank holds while it trains from containers
_CLEAN_JSON = 1  # version of the json that _clean_json makes: raise it when that changes
_MAX_SEED = 2**31 - 1  # DALI's shuffle_after_epoch_seed is an int32

Nodes = tuple[DataNode, DataNode, DataNode, DataNode]


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
    check_shards(annotations.num_images, num_shards, seed)
    clean_name = f"{annotations.fingerprint()[:32]}-{_CLEAN_JSON}.coco.json"
    clean_json = get_or_create(clean_name, lambda: _clean_json(annotations))
    jpegs, boxes, labels, rows = fn.readers.coco(
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


def tfrecord_reader(
    records: Records | Sequence[str | os.PathLike],
    label_map: LabelMap,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    name: str = "reader",
) -> Nodes:
    """Reads TFRecords in the schema of TensorFlow Object Detection, inside a DALI graph.

    Give it what the data check opened (`TFRecordSource.records`): DALI never checks a CRC, trusts any index
    and returns uninitialised memory for a missing feature.

    Args:
        records: the files with their indexes, or paths, in the same order on all ranks. Of paths, indexes and
            keys are checked here, data are not.
        label_map: of the category ids in the records.
        training, shard_id, num_shards, seed, name: as for `coco_reader`.

    Returns:
        (jpegs, boxes, labels, image_ids), see the module docstring.

    Raises:
        UserError: fewer images than shards; paths that cannot be read, or records that lack a key.
    """
    if not isinstance(records, Records):
        records = tfrecord.index_records(records)
    check_shards(len(records.spans), num_shards, seed)
    text = dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, "")
    floats = dali_tfrecord.VarLenFeature(dali_tfrecord.float32, 0.0)
    integers = dali_tfrecord.VarLenFeature(dali_tfrecord.int64, 0)
    features = {
        "image/encoded": text,
        "image/source_id": text,
        **dict.fromkeys(BOX_KEYS, floats),
        LABEL_KEY: integers,
        **({CROWD_KEY: integers} if records.has_crowds else {}),
    }
    record = fn.readers.tfrecord(
        path=list(records.files),
        index_path=list(records.indexes),
        features=features,
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        **order(training, seed, in_container=True),
    )
    boxes = dali_math.clamp(fn.stack(*(record[key] for key in BOX_KEYS), axis=1), 0.0, 1.0)
    labels = _labels(record[LABEL_KEY], label_map)
    if records.has_crowds:  # without area they are dropped
        no_crowd = fn.cast(record[CROWD_KEY] == 0, dtype=types.FLOAT)
        boxes = boxes * fn.expand_dims(no_crowd, axes=[1])
    if records.has_crowds or records.has_empty_boxes:
        boxes, labels = box_encoder.drop_small_boxes(boxes, labels)
    return record["image/encoded"], boxes, labels, parse_integer(record["image/source_id"])


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
    check_shards(len(files), num_shards, 0)
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


# --- which rank reads which images, in which order ---


def shard_range(size: int, shard_id: int, num_shards: int) -> tuple[int, int]:
    """The part [begin, end) of `size` images that DALI gives to a shard (start_index in its loader.h)."""
    return size * shard_id // num_shards, size * (shard_id + 1) // num_shards


def check_shards(num_images: int, num_shards: int, seed: int) -> None:
    """UserError for more ranks than images or a seed that DALI cannot take."""
    if num_images < num_shards:
        raise UserError(
            f"{num_images} images cannot be shared by {num_shards} ranks: use at most {num_images} ranks"
        )
    if not 0 <= seed <= _MAX_SEED:
        raise UserError(f"seed={seed} is not in 0..{_MAX_SEED}")


def order(training: bool, seed: int, *, in_container: bool = False) -> dict[str, bool | int]:
    """The arguments of DALI's readers that order images.

    Args:
        training: shuffled without end; otherwise each rank reads its part, always in the same order.
        seed: of the shuffling.
        in_container: for readers of containers, which DALI shuffles by file and within a buffer.
    """
    if not training:
        return {"pad_last_batch": True, "stick_to_shard": True}
    # The pipeline's own seed does not affect this shuffling.
    shuffled = {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed}
    return shuffled | (buffer_order(seed) if in_container else {})


def buffer_order(seed: int) -> dict[str, bool | int]:
    """The arguments of DALI's readers that shuffle within a buffer."""
    return {"random_shuffle": True, "initial_fill": SHUFFLE_BUFFER, "seed": seed}


# --- numbers that DALI reads as text, or cannot hold ---


def parse_integer(digits: DataNode) -> DataNode:
    """ASCII digits uint8 (n,), n up to 19 -> int64 ()."""
    exponents = np.arange(18, -1, -1)
    # DALI's constants are 32-bit: each power of ten is a product of two.
    large = types.Constant(10 ** np.maximum(exponents - 9, 0).astype(np.int32), device="cpu")
    small = types.Constant(10 ** np.minimum(exponents, 9).astype(np.int32), device="cpu")
    powers = fn.cast(large, dtype=types.INT64) * fn.cast(small, dtype=types.INT64)
    values = fn.cast(digits, dtype=types.INT64) - ord("0")
    return fn.reductions.sum(values * powers[19 - digits.shape()[0] :], dtype=types.INT64)


def _labels(category_ids: DataNode, label_map: LabelMap) -> DataNode:
    """int64 (N,) category ids -> int32 (N,) labels. fn.lookup_table would do, but refuses ids above 65535."""
    known = np.array([label_map.category_ids], np.int64)  # (1, C)
    if known.max() < 2**31:
        keys = types.Constant(known.astype(np.int32), device="cpu")
    else:  # DALI's constants are 32-bit: each id travels as two halves
        halves = types.Constant(known.view(np.int32).reshape(1, -1, 2), device="cpu")
        keys = fn.squeeze(fn.reinterpret(halves, dtype=types.INT64), axes=[2])
    labels = types.Constant(np.arange(1, label_map.num_classes + 1, dtype=np.int32)[np.newaxis], device="cpu")
    is_same = fn.expand_dims(category_ids, axes=[1]) == keys  # (N, C)
    found = fn.reductions.sum(fn.cast(is_same, dtype=types.INT32) * labels, axes=[1])
    return fn.cast(found, dtype=types.INT32)


# --- files that DALI reads ---


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
