"""Reads images from nine kinds of sources: a function for DALI's Pipeline API, and one for its Dynamic API.

    @pipeline_def(batch_size=32, num_threads=4, device_id=None)
    def pipeline():
        encoded, labels = sources.files_pipeline(paths, labels)
        return fn.decoders.image(encoded), labels

    for encoded, labels in sources.files_dynamic(paths, labels, batch_size=32):
        images = ndd.decoders.image(encoded)

Copy the functions that you need: the file needs only DALI and NumPy. `*_pipeline` adds an endless reader to a
graph. `*_dynamic` yields the batches of one epoch, each a tuple. Both read in the order of the source, and
DALI fills the last batch of an epoch with repeated images. `options` go to DALI's reader, for example
`shard_id=rank, num_shards=ranks`, or `random_shuffle=True, initial_fill=1024` to shuffle.

Encoded images are uint8 (bytes,). DALI's readers trust their input: a record file that is cut off, a stale
index or a missing key gives wrong images or ends the process. checks.py has the checks of preprocess.py.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import nvidia.dali.tfrecord as tfrecord
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

Nodes = tuple[DataNode, ...]
Batches = Iterator[tuple[ndd.Batch, ...]]

# --- files: image files, and a label (int32) for each ---


def files_pipeline(paths: Sequence[str], labels: Sequence[int], **options) -> Nodes:
    """Returns encoded images and labels, int32 (1,)."""
    return tuple(fn.readers.file(files=paths, labels=labels, name="reader", **options))


def files_dynamic(paths: Sequence[str], labels: Sequence[int], *, batch_size: int, **options) -> Batches:
    reader = ndd.readers.File(files=paths, labels=labels, **options)
    yield from reader.next_epoch(batch_size=batch_size)


# --- list: a text file with a line `path label` for each image; paths are relative to `directory` ---


def list_pipeline(path: str, directory: str, **options) -> Nodes:
    """Returns encoded images and labels, int32 (1,)."""
    return tuple(fn.readers.file(file_list=path, file_root=directory, name="reader", **options))


def list_dynamic(path: str, directory: str, *, batch_size: int, **options) -> Batches:
    reader = ndd.readers.File(file_list=path, file_root=directory, **options)
    yield from reader.next_epoch(batch_size=batch_size)


# --- external: any sequence in Python, of encoded images (bytes) or arrays (height, width, channels) ---


def external_pipeline(images: Sequence[bytes | np.ndarray]) -> Nodes:
    """Returns the images. Starts again at the end of the sequence."""

    def read(info: types.SampleInfo) -> np.ndarray:
        return _array(images[info.idx_in_epoch % len(images)])

    return (fn.external_source(source=read, batch=False, layout=_layout(images)),)


def external_dynamic(images: Sequence[bytes | np.ndarray], *, batch_size: int) -> Batches:
    for begin in range(0, len(images), batch_size):
        batch = [_array(image) for image in images[begin : begin + batch_size]]
        yield (ndd.as_batch(batch, layout=_layout(images)),)


def _array(image: bytes | np.ndarray) -> np.ndarray:
    return np.frombuffer(image, np.uint8) if isinstance(image, bytes) else np.ascontiguousarray(image)


def _layout(images: Sequence[bytes | np.ndarray]) -> str | None:
    return None if isinstance(images[0], bytes) else "HWC"


# --- tfrecord: tf.train.Examples; an index has a line `offset size` for each record (DALI's tfrecord2idx) ---

FEATURES = {
    "image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, ""),
    "image/class/label": tfrecord.VarLenFeature(tfrecord.int64, 0),  # must be in every record
}
ONLY_IMAGES = {"image/encoded": FEATURES["image/encoded"]}


def tfrecord_pipeline(
    paths: Sequence[str], indexes: Sequence[str], features: dict = FEATURES, **options
) -> Nodes:
    """Returns the features, here encoded images and labels, int64 (n,)."""
    options |= {"path": paths, "index_path": indexes, "features": features, "name": "reader"}
    record = fn.readers.tfrecord(**options)
    return tuple(record[name] for name in features)


def tfrecord_dynamic(
    paths: Sequence[str], indexes: Sequence[str], features: dict = FEATURES, *, batch_size: int, **options
) -> Batches:
    reader = ndd.readers.TFRecord(path=paths, index_path=indexes, features=features, **options)
    for record in reader.next_epoch(batch_size=batch_size):
        yield tuple(record[name] for name in features)


# --- coco: the json of a detection data set. Without `images`, DALI reads in the order of the image ids ---

BOXES = {"ratio": True, "ltrb": True}  # boxes in 0..1 of the image: left, top, right, bottom


def coco_pipeline(annotations: str, directory: str, images: Sequence[str] = (), **options) -> Nodes:
    """Returns encoded images, boxes, float32 (N, 4), and labels, int32 (N,), 1-based.

    Args:
        annotations: path of the json. Labels follow the order of its categories.
        directory: the directory of the images.
        images: file names in the order in which they are read.
    """
    options |= BOXES | ({"images": images} if images else {})
    return tuple(fn.readers.coco(annotations_file=annotations, file_root=directory, name="reader", **options))


def coco_dynamic(
    annotations: str, directory: str, images: Sequence[str] = (), *, batch_size: int, **options
) -> Batches:
    options |= BOXES | ({"images": images} if images else {})
    reader = ndd.readers.COCO(annotations_file=annotations, file_root=directory, **options)
    yield from reader.next_epoch(batch_size=batch_size)


# --- lmdb: a directory with data.mdb; values are Caffe's Datum, or Caffe2's TensorProtos (image, label) ---

LABEL, NO_LABEL = 0, 4  # `label_type` of Caffe2's reader


def lmdb_pipeline(directory: str, *, caffe2: bool = False, has_labels: bool = True, **options) -> Nodes:
    """Returns encoded images and, with `has_labels`, labels, int32 (1,); in the order of the keys."""
    options |= {"path": directory, "name": "reader"}
    if caffe2:
        return _tuple(fn.readers.caffe2(label_type=LABEL if has_labels else NO_LABEL, **options))
    return _tuple(fn.readers.caffe(label_available=has_labels, **options))


def lmdb_dynamic(
    directory: str, *, batch_size: int, caffe2: bool = False, has_labels: bool = True, **options
) -> Batches:
    if caffe2:
        label_type = LABEL if has_labels else NO_LABEL
        reader = ndd.readers.Caffe2(path=directory, label_type=label_type, **options)
    else:
        reader = ndd.readers.Caffe(path=directory, label_available=has_labels, **options)
    yield from reader.next_epoch(batch_size=batch_size)


# --- recordio: MXNet's .rec file; its index has a line `number<TAB>offset` for each record ---


def recordio_pipeline(path: str, index: str, **options) -> Nodes:
    """Returns encoded images and labels, float32 (n,)."""
    return tuple(fn.readers.mxnet(path=[path], index_path=[index], name="reader", **options))


def recordio_dynamic(path: str, index: str, *, batch_size: int, **options) -> Batches:
    reader = ndd.readers.MXNet(path=[path], index_path=[index], **options)
    yield from reader.next_epoch(batch_size=batch_size)


# --- webdataset: tar files with samples such as 0001.jpg, 0001.cls; `index_paths=` (wds2idx) saves time ---

IMAGE = "jpg;jpeg;png;bmp;webp;tif;tiff;jp2"  # the first that a sample has
EXTENSIONS = (IMAGE, "cls")


def webdataset_pipeline(paths: Sequence[str], extensions: Sequence[str] = EXTENSIONS, **options) -> Nodes:
    """Returns the files of each sample, here the encoded image and the text of its label, uint8 (digits,)."""
    options |= {"case_sensitive_extensions": False, "missing_component_behavior": "error", "name": "reader"}
    return _tuple(fn.readers.webdataset(paths=paths, ext=extensions, **options))


def webdataset_dynamic(
    paths: Sequence[str], extensions: Sequence[str] = EXTENSIONS, *, batch_size: int, **options
) -> Batches:
    options |= {"case_sensitive_extensions": False, "missing_component_behavior": "error"}
    reader = ndd.readers.Webdataset(paths=paths, ext=extensions, **options)
    yield from reader.next_epoch(batch_size=batch_size)


# --- numpy: .npy files, each an array (height, width, channels): nothing has to be decoded ---


def numpy_pipeline(paths: Sequence[str], **options) -> Nodes:
    """Returns the arrays."""
    return (fn.reshape(fn.readers.numpy(files=paths, name="reader", **options), layout="HWC"),)


def numpy_dynamic(paths: Sequence[str], *, batch_size: int, **options) -> Batches:
    for (images,) in ndd.readers.Numpy(files=paths, **options).next_epoch(batch_size=batch_size):
        yield (ndd.reshape(images, layout="HWC"),)


def _tuple(outputs):
    return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
