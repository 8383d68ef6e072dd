"""What readers.py gives DALI in place of the user's json, and numbers that it gets back in another form."""

import msgspec
import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from common.annotations import Annotations
from common.labels import LabelMap


class _Image(msgspec.Struct, gc=False):
    id: int
    file_name: str
    width: int
    height: int


class _Object(msgspec.Struct, gc=False):
    id: int
    image_id: int
    category_id: int
    bbox: list[float]
    iscrowd: int = 0


def clean_json(annotations: Annotations) -> bytes:
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
            "annotations": [
                _Object(i, image, label, box) for i, (image, label, box) in enumerate(objects, 1)
            ],
            "categories": [{"id": i, "name": name} for i, name in enumerate(annotations.label_map.names, 1)],
        }
    )


def labels_of(category_ids: DataNode, label_map: LabelMap) -> DataNode:
    """int64 (N,) category ids -> int32 (N,) labels. fn.lookup_table would do, but refuses ids above 65535."""
    known = np.array([label_map.category_ids], np.int64)  # (1, C)
    if known.max() < 2**31:
        keys = types.Constant(known.astype(np.int32), device="cpu")
    else:  # DALI's constants are 32-bit: each id travels as two halves
        halves = types.Constant(known.view(np.int32).reshape(1, -1, 2), device="cpu")
        keys = fn.squeeze(fn.reinterpret(halves, dtype=types.INT64), axes=[2])
    labels = types.Constant(np.arange(1, label_map.num_classes + 1, dtype=np.int32)[np.newaxis], device="cpu")
    is_same = fn.expand_dims(category_ids, axes=[1]) == keys  # (N, C)
    return fn.cast(
        fn.reductions.sum(fn.cast(is_same, dtype=types.INT32) * labels, axes=[1]), dtype=types.INT32
    )


def integer_of(digits: DataNode) -> DataNode:
    """ASCII digits uint8 (n,), n up to 19 -> int64 ()."""
    exponents = np.arange(18, -1, -1)
    # DALI's constants are 32-bit: each power of ten is a product of two.
    large = types.Constant(10 ** np.maximum(exponents - 9, 0).astype(np.int32), device="cpu")
    small = types.Constant(10 ** np.minimum(exponents, 9).astype(np.int32), device="cpu")
    powers = fn.cast(large, dtype=types.INT64) * fn.cast(small, dtype=types.INT64)
    values = fn.cast(digits, dtype=types.INT64) - ord("0")
    return fn.reductions.sum(values * powers[19 - digits.shape()[0] :], dtype=types.INT64)
