"""The first nodes of a DALI graph: encoded images, with their boxes where they have some.

`coco_reader` and `tfrecord_reader` give the same four nodes, in the same units, from the same images:

    jpegs       uint8 (bytes,): an encoded image, JPEG, PNG or whatever else DALI decodes
    boxes       float32 (N, 4), ltrb normalised, within [0, 1], each with some area; N may be 0
    labels      int32 (N,), 1-based: class + 1
    image_ids   int64 (), the original ids, of any size

Crowds are never targets: they live in the ground truth that pycocotools gets (`Annotations.ground_truth`).
`image_reader` reads images without boxes, with a label at most, from whatever holds them.

Boxes belong to the stored pixels, so decode with `adjust_orientation=False`: turning an image by its EXIF
tag would leave its boxes behind.

Order, as DALI 2.4 was seen to do it:

* Training: the whole set is permuted anew for every epoch, the first one included, by a seed that is the
  same on all ranks; rank r reads the r-th part of each permutation. Parts are disjoint and together
  complete. A part is one image longer on some ranks if the ranks do not divide the size, and a rank's next
  epoch begins when its own part is read: batches cross epochs, and ranks with the shorter part run slowly
  ahead.
* TFRecords, and the other containers, are permuted by file, and within a buffer of 1024 records: write them
  shuffled (tools/convert.py does). LMDB is permuted within the buffer alone, and each epoch a rank reads
  the part of the next one.
* Evaluation: each rank reads its own part in order, for ever the same, repeating its last image until all
  ranks have the same number of batches: every image exactly once after dropping repeated ids.
"""

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import nvidia.dali.tfrecord as dali_tfrecord
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import box_encoder, reader_calls, tfrecord
from common.annotations import Annotations
from common.files import get_or_create
from common.labels import LabelMap
from common.reader_parts import clean_json as _clean_json
from common.reader_parts import integer_of, labels_of
from common.shards import check_shards, container_order, order
from common.shards import shard_range as shard_range
from common.tfrecord import BOX_KEYS, CROWD_KEY, LABEL_KEY, Records

if TYPE_CHECKING:
    from common.datacheck.images import ImagePolicy

_CLEAN_JSON = 1  # version of what _clean_json makes of annotations: raise it when that changes

Nodes = tuple[DataNode, DataNode, DataNode, DataNode]


def coco_reader(
    images_dir: str | os.PathLike,
    annotations: Annotations,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    name: str = "reader",
) -> Nodes:
    """Reads image files with the annotations of `datacheck.coco.load_coco`, inside a DALI graph.

    DALI is not given the user's json but one written from the checked annotations: images numbered in the
    order of the file (DALI refuses ids above 2**31), labels, clipped boxes, no crowds. It lies in the
    user's cache directory.

    Args:
        images_dir: what the annotations' file names refer to.
        annotations: checked against that directory.
        training: shuffled without end, or in order (module docstring).
        shard_id: which part to read, the rank.
        num_shards: how many parts, the number of ranks.
        seed: of the shuffling, the same on all ranks; 0 is a seed like any other.
        name: of the DALI operator; `pipeline.epoch_size(name)` asks for it.

    Returns:
        (jpegs, boxes, labels, image_ids), see above.

    Raises:
        UserError: fewer images than shards.
    """
    check_shards(annotations.num_images, shard_id, num_shards, seed)
    jpegs, boxes, labels, rows = fn.readers.coco(
        file_root=os.fspath(images_dir),
        annotations_file=os.fspath(
            get_or_create(
                f"{annotations.fingerprint()[:32]}-{_CLEAN_JSON}.coco.json", lambda: _clean_json(annotations)
            )
        ),
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
        training: shuffled without end, or in order (module docstring).
        shard_id: which part to read, the rank.
        num_shards: how many parts, the number of ranks.
        seed: of the shuffling, the same on all ranks; 0 is a seed like any other.
        name: of the DALI operator; `pipeline.epoch_size(name)` asks for it.

    Returns:
        (jpegs, boxes, labels, image_ids), see above.

    Raises:
        UserError: fewer images than shards; paths that cannot be read, or records that lack a key.
    """
    if not isinstance(records, Records):
        records = tfrecord.index_records(records)
    check_shards(len(records.spans), shard_id, num_shards, seed)
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
        **container_order(training, seed),
    )
    boxes = dali_math.clamp(fn.stack(*(record[key] for key in BOX_KEYS), axis=1), 0.0, 1.0)
    labels = labels_of(record[LABEL_KEY], label_map)
    if records.has_crowds:  # without area they are dropped
        no_crowd = fn.cast(record[CROWD_KEY] == 0, dtype=types.FLOAT)
        boxes = boxes * fn.expand_dims(no_crowd, axes=[1])
    if records.has_crowds or records.has_empty_boxes:
        boxes, labels = box_encoder.drop_small_boxes(boxes, labels)
    return record["image/encoded"], boxes, labels, integer_of(record["image/source_id"])


def file_reader(
    files: Sequence[str | os.PathLike], *, shard_id: int = 0, num_shards: int = 1, name: str = "reader"
) -> Nodes:
    """Reads image files without annotations, in order, inside a DALI graph; no boxes.

    Args:
        files: their positions in this list, from 0, are the image ids.
        shard_id: which part to read, the rank.
        num_shards: how many parts, the number of ranks.
        name: of the DALI operator.

    Returns:
        (jpegs, boxes, labels, image_ids), see above, with N = 0.

    Raises:
        UserError: fewer images than shards.
    """
    check_shards(len(files), shard_id, num_shards, 0)
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


def image_reader(
    kind: str,
    path: str,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    name: str = "reader",
    policy: "ImagePolicy | None" = None,
) -> tuple[DataNode, DataNode]:
    """Reads images without boxes from any source of tools/preprocessing/image_source.py, in a DALI graph.

    Args:
        kind: of the source.
        path: of it.
        training: shuffled without end, or in order (module docstring).
        shard_id: which part to read, the rank.
        num_shards: how many parts, the number of ranks.
        seed: of the shuffling, the same on all ranks; 0 is a seed like any other.
        name: of the DALI operator; `pipeline.epoch_size(name)` asks for it, where it is a reader of DALI.
        policy: about images that cannot be used; None: they are an error.

    Returns:
        images uint8 (bytes,), encoded, or (H, W, C), where the source holds arrays; labels int32 (), -1 where
        there is none.

    Raises:
        DataError: images that cannot be used.
        UserError: a source that cannot be read; fewer images than shards.
    """
    # The apps read without it: an app that is copied elsewhere need not bring all formats along.
    from tools.preprocessing.image_source import open_image_source

    source = open_image_source(kind, path, **({} if policy is None else {"policy": policy}))
    call = source.call(shard_id=shard_id, num_shards=num_shards, training=training, seed=seed)
    return reader_calls.in_graph(call, name)


image_tfrecord_reader = functools.partial(image_reader, "tfrecord")
lmdb_reader = functools.partial(image_reader, "lmdb")
recordio_reader = functools.partial(image_reader, "recordio")
webdataset_reader = functools.partial(image_reader, "webdataset")
numpy_reader = functools.partial(image_reader, "numpy")
external_reader = functools.partial(image_reader, "external")
