r"""COCO to TFRecords in the schema of TensorFlow Object Detection, with label map and DALI indexes.

    python common/tfrecord.py --images=train2017 --annotations=instances_train2017.json \\
        --output=records/train --num_shards=256

writes records/train-00000-of-00256.tfrecord, its .idx, and so on, and records/train.label_map.json. The
keys are those of google/automl efficientdet/dataset/create_coco_tfrecord.py, so either project reads the
other's files; the label is the COCO category id. Unlike there, images are shuffled, boxes that reach
outside are clipped and not dropped, and images without objects have all keys, with empty lists.

The bytes depend on the images, the annotations, the number of shards and the seed, and on nothing else.
"""

import collections
import concurrent.futures
import io
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
import PIL.Image
import tensorflow as tf
from absl import flags

from common import atomic, errors, progress, tfrecord_index
from common.annotations import Annotations, load_coco
from common.errors import UserError
from common.tfrecord_scan import AREA_KEY, BOX_KEYS, CROWD_KEY, LABEL_KEY

# Pillow's name of a format -> image/format. A multi-picture object is a JPEG with more JPEGs behind it.
_FORMATS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png"}
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def write_tfrecords(
    annotations: Annotations,
    images_dir: str | os.PathLike,
    prefix: str | os.PathLike,
    *,
    num_shards: int,
    seed: int = 0,
    num_workers: int = 4,
) -> list[str]:
    """Writes `<prefix>-00000-of-<num_shards>.tfrecord` ... with indexes, and `<prefix>.label_map.json`.

    Each file appears when it is complete; the label map, which also records the seed and the source, comes
    last, so that a set without one is an unfinished set.

    Args:
        annotations: what `load_coco` returned.
        images_dir: what their file names refer to.
        prefix: directory (made if missing) and beginning of the names.
        num_shards: number of files, at most one per image.
        seed: of the order of the images.
        num_workers: threads that read images; no influence on the result.

    Returns:
        The record files.

    Raises:
        UserError: an image that is neither JPEG nor PNG or has another size than the annotations say; files
            of another set in the way; the disk.
    """
    prefix = os.fspath(prefix)
    if not os.path.basename(prefix):
        raise UserError(
            f"--output={prefix} is a directory: add the beginning of the file names, {prefix}train"
        )
    if not 1 <= num_shards <= annotations.num_images:
        raise UserError(
            f"--num_shards={num_shards} is not in 1..{annotations.num_images}, the number of images"
        )
    files = [f"{prefix}-{shard:05d}-of-{num_shards:05d}.tfrecord" for shard in range(num_shards)]
    label_map_path = pathlib.Path(f"{prefix}.label_map.json")
    try:
        label_map_path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_other_set(label_map_path.parent, os.path.basename(prefix), files)
        label_map_path.unlink(missing_ok=True)
        _write_shards(annotations, os.fspath(images_dir), files, seed, num_workers)
        _write_label_map(label_map_path, annotations, num_shards, seed)
    except OSError as error:
        raise UserError(f"{error.filename or prefix}: {error.strerror or error}") from error
    return files


def make_example(annotations: Annotations, row: int, encoded: bytes, image_format: str) -> tf.train.Example:
    """The record of one image: its bytes as they are, its boxes clipped; boxes without area are left out."""
    begin, end = annotations.row_splits[row : row + 2]
    boxes, _ = annotations.clipped_boxes
    boxes = boxes[begin:end]
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    category_ids = annotations.category_ids[begin:end][kept].tolist()
    label_map = annotations.label_map
    names = [label_map.names[label_map.class_of(i)].encode() for i in category_ids]
    height, width = annotations.image_sizes[row].tolist()
    features = {
        "image/encoded": _bytes([encoded]),
        "image/format": _bytes([image_format.encode()]),
        "image/filename": _bytes([annotations.file_names[row].encode()]),
        "image/source_id": _bytes([str(annotations.image_ids[row]).encode()]),
        "image/height": _integers([height]),
        "image/width": _integers([width]),
        **{key: _floats(boxes[kept, side].tolist()) for side, key in enumerate(BOX_KEYS)},
        LABEL_KEY: _integers(category_ids),
        "image/object/class/text": _bytes(names),
        CROWD_KEY: _integers(annotations.is_crowd[begin:end][kept].astype(int).tolist()),
        AREA_KEY: _floats(annotations.areas[begin:end][kept].tolist()),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))


def _bytes(values: list[bytes]) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def _floats(values: list[float]) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def _integers(values: list[int]) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _write_shards(
    annotations: Annotations, images_dir: str, files: list[str], seed: int, num_workers: int
) -> None:
    order = np.random.default_rng(seed).permutation(annotations.num_images).tolist()
    bar = progress.Bar("Writing records", annotations.num_images)

    def serialize(row: int) -> bytes:
        path = os.path.join(images_dir, annotations.file_names[row])
        encoded = pathlib.Path(path).read_bytes()
        image_format = _check_image(encoded, path, annotations.image_sizes[row].tolist())
        # Protobuf's maps have no order unless asked.
        return make_example(annotations, row, encoded, image_format).SerializeToString(deterministic=True)

    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        for shard, file in enumerate(files):
            records = _in_order(pool, serialize, order[shard :: len(files)], ahead=2 * num_workers)

            def write(temporary: pathlib.Path, records: Iterator[bytes] = records) -> None:
                with tf.io.TFRecordWriter(os.fspath(temporary)) as writer:
                    for record in records:
                        writer.write(record)
                        bar.step()

            atomic.write(file, write)
            tfrecord_index.write_index(file)


def _in_order(
    pool: concurrent.futures.Executor, function: Callable[[int], bytes], items: Iterable[int], ahead: int
) -> Iterator[bytes]:
    """`pool.map`, but at most `ahead` results wait in memory."""
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _check_image(encoded: bytes, path: str, image_size: list[int]) -> str:
    """The format in the bytes; UserError unless the size in them is `image_size`."""
    try:
        with PIL.Image.open(io.BytesIO(encoded)) as image:
            image_format, (width, height) = image.format, image.size
            orientation = image.getexif().get(0x0112)
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise UserError(f"{path} is no image that can be read: {error}") from error
    if image_format not in _FORMATS:
        raise UserError(f"{path} is a {image_format} file: the schema knows JPEG and PNG, convert it")
    if [height, width] != image_size:
        rotated = orientation in _ROTATED and [width, height] == image_size
        hint = (
            "its EXIF tag turns it, but boxes must refer to the stored pixels: turn the pixels, drop the tag"
            if rotated
            else "its boxes would be scaled wrongly: correct width and height"
        )
        raise UserError(
            f"{path} is {width} x {height} pixels, the annotations say {image_size[1]} x {image_size[0]};"
            f" {hint}"
        )
    return _FORMATS[image_format]


def _refuse_other_set(directory: pathlib.Path, name: str, files: list[str]) -> None:
    """A glob over two sets with one prefix would read every image twice."""
    own = {os.path.basename(file) for file in files}
    for path in sorted(directory.iterdir()):
        stem, dash, _ = path.name.rpartition("-of-")
        other = (
            dash and stem.rpartition("-")[0] == name and path.suffix == ".tfrecord" and path.name not in own
        )
        if other:
            raise UserError(
                f"{path} belongs to another set with this prefix: remove that set or change --output"
            )


def _write_label_map(path: pathlib.Path, annotations: Annotations, num_shards: int, seed: int) -> None:
    targets = annotations.target_boxes
    document = {
        "categories": annotations.label_map.categories(),
        "source": {
            "annotations": os.path.basename(annotations.origin),
            "fingerprint": annotations.fingerprint(),
            "images": annotations.num_images,
            "objects": len(targets.boxes),
            "seed": seed,
            "shards": num_shards,
        },
    }
    atomic.write_bytes(path, (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode())


def define_flags(flag_values: flags.FlagValues) -> None:
    """The flags of this command."""
    flags.DEFINE_string("images", None, "Directory of images.", flag_values=flag_values)
    flags.DEFINE_string("annotations", None, "COCO json.", flag_values=flag_values)
    flags.DEFINE_string("output", None, "Prefix of the files to write.", flag_values=flag_values)
    flags.DEFINE_integer("num_shards", 1, "Number of files.", lower_bound=1, flag_values=flag_values)
    flags.DEFINE_integer("seed", 0, "Of the order of the images.", lower_bound=0, flag_values=flag_values)
    flags.DEFINE_integer(
        "num_workers", 4, "Threads that read images.", lower_bound=1, flag_values=flag_values
    )
    flags.mark_flags_as_required(["images", "annotations", "output"], flag_values=flag_values)


def main() -> None:
    """The command."""
    values = flags.FLAGS
    annotations = load_coco(values.annotations, values.images)
    files = write_tfrecords(
        annotations,
        values.images,
        values.output,
        num_shards=values.num_shards,
        seed=values.seed,
        num_workers=values.num_workers,
    )
    print(annotations.summary())
    print(f"{len(files)} files: {values.output}-*.tfrecord; label map: {values.output}.label_map.json")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    errors.run(main)
