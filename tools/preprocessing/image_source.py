"""The images that --source and --input mean, looked at before anything reads them.

    source = open_image_source("files", "photos")
    images, labels = reader_calls.in_graph(source.call())               # in a pipeline
    for images, labels in reader_calls.in_dynamic(source.call(), 32):   # or without one

Images that cannot be used are named and counted, and stop everything or are left out, as everywhere in this
project (common/issues.py).
"""

from collections.abc import Callable

from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import log_findings
from common.errors import UserError, unknown
from common.issues import Findings
from tools.preprocessing.formats import (
    external,
    files,
    lmdb_images,
    numpy_files,
    recordio,
    tfrecord,
    webdataset,
)
from tools.preprocessing.formats.base import Given, ImageSource

__all__ = ["KINDS", "ImageSource", "open_image_source"]


def open_image_source(
    kind: str,
    path: str,
    *,
    policy: ImagePolicy = ImagePolicy(),
    annotations: str | None = None,
    images: str | None = None,
    label_map: str | None = None,
    on_report: Callable[[Findings], None] = log_findings,
) -> ImageSource:
    """Opens a source and looks at all its images.

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
    if kind in _WITHOUT_LABEL_MAP and label_map:
        raise UserError(f"--label_map={label_map}: --source={kind} has no numbers to be named")
    return KINDS[kind](Given(path, policy, annotations, images, label_map, on_report))


KINDS = {
    "files": files.open_files,
    "list": files.open_list,
    "tfrecord": tfrecord.open_tfrecord,
    "coco": files.open_coco,
    "external": external.open_external,
    "lmdb": lmdb_images.open_lmdb,
    "recordio": recordio.open_recordio,
    "webdataset": webdataset.open_webdataset,
    "numpy": numpy_files.open_numpy,
}
_WITHOUT_LABEL_MAP = ("files", "coco")
