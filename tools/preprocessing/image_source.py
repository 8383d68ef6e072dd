"""The images that --source and --input name, checked before anything reads them.

    source = open_image_source("files", "photos")
    images, labels = reading.in_graph(source.call())               # in a pipeline
    for images, labels in reading.in_dynamic(source.call(), 32):   # in the Dynamic API

Images that cannot be used are named and counted, and stop everything or are left out
(common/datacheck/issues.py).
"""

from collections.abc import Callable

from nvidia.dali.data_node import DataNode

from common.datacheck.images import ImagePolicy
from common.datacheck.issues import Issues
from common.datacheck.open_data import log_issues
from common.errors import UserError, unknown
from tools.preprocessing import reading
from tools.preprocessing.formats import (
    external,
    files,
    lmdb_images,
    records,
    webdataset,
)
from tools.preprocessing.formats.base import ImageSource, SourceFlags

KINDS = {
    "files": files.open_files,
    "list": files.open_list,
    "tfrecord": records.open_tfrecord,
    "coco": files.open_coco,
    "external": external.open_external,
    "lmdb": lmdb_images.open_lmdb,
    "recordio": records.open_recordio,
    "webdataset": webdataset.open_webdataset,
    "numpy": files.open_numpy,
}


def open_image_source(
    kind: str,
    path: str,
    *,
    policy: ImagePolicy = ImagePolicy(),
    annotations: str | None = None,
    images: str | None = None,
    label_map: str | None = None,
    on_report: Callable[[Issues], None] = log_issues,
) -> ImageSource:
    """Opens a source and checks all its images.

    Args:
        kind: a key of KINDS.
        path: --input: a path, a glob, or a Python name.
        policy: about images that cannot be used.
        annotations, images: of a COCO json, the part of it that `path` is not.
        label_map: a file that names labels.
        on_report: gets what was left out, mended or is remarkable.

    Raises:
        UserError: no such kind, no such input, or one that cannot be read.
        DataError: images that cannot be used, where the policy is to stop.
    """
    if kind not in KINDS:
        raise unknown("source", kind, KINDS)
    if kind != "coco" and (annotations or images):
        raise UserError(f"--annotations and --images are for --source=coco, not for --source={kind}")
    if kind in ("files", "coco") and label_map:
        raise UserError(f"--label_map={label_map}: --source={kind} has no numbers to be named")
    return KINDS[kind](SourceFlags(path, policy, annotations, images, label_map, on_report))


def image_reader(
    kind: str,
    path: str,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    name: str = "reader",
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[DataNode, DataNode]:
    """Reads images of any source, without boxes, inside a DALI graph.

    Args:
        kind, path, policy: as for `open_image_source`.
        training: shuffled without end, or in order (common/readers.py).
        shard_id: the part to read, the rank.
        num_shards: number of parts, the number of ranks.
        seed: of the shuffling, the same on all ranks; 0 is a valid seed.
        name: of the DALI operator, for `pipeline.epoch_size(name)`, where DALI has a reader.

    Returns:
        images uint8 (bytes,), encoded, or (H, W, C), where the source holds arrays; labels int32 (), -1 where
        there is none.

    Raises:
        UserError: a source that cannot be read; fewer images than shards.
        DataError: images that cannot be used.
    """
    source = open_image_source(kind, path, policy=policy)
    call = source.call(shard_id=shard_id, num_shards=num_shards, training=training, seed=seed)
    return reading.in_graph(call, name)
