"""Preprocessed images as TFRecords, with DALI's index beside each file.

The keys are those of tensorflow/models research/slim/datasets/dataset_utils.py, image_to_tfexample
(image/encoded, image/format, image/class/label, image/height, image/width), with the name and the position of
the source in image/filename and image/source_id, and image/class/text where labels have names.
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from common.datacheck.tfrecord_scan import name_files
from common.errors import UserError
from common.tfrecord import bytes_feature, integers_feature, write_index
from tools.preprocessing.output_encoding import Encoding
from tools.preprocessing.output_sample import (
    Sample,
    counted,
    final_names,
    label_name,
    write_files,
)

SUFFIX = ".tfrecord"


@dataclasses.dataclass(frozen=True)
class RecordOutput:
    """Record files, each with equally many images or one more, in the order of the source.

    Attributes:
        files: in one directory.
        encoding: of the images in them.
        has_labels: whether records have labels; -1 then stands for none.
        label_names: by label; may be empty.
    """

    files: Sequence[pathlib.Path]
    encoding: Encoding
    has_labels: bool
    label_names: Sequence[str] = ()

    def write(self, samples: Iterable[Sample], total: int) -> str:
        if total < len(self.files):
            raise UserError(f"--output_shards={len(self.files)} is not in 1..{total}, the number of images")
        directory = self.files[0].parent

        def write(staged: pathlib.Path) -> None:
            rest = counted(samples, total)
            for shard, file in enumerate(self.files):
                begin, end = (total * (shard + i) // len(self.files) for i in (0, 1))
                path = staged / file.name
                with tf.io.TFRecordWriter(os.fspath(path)) as writer:
                    for sample in itertools.islice(rest, end - begin):
                        writer.write(self._record(sample))
                write_index(path)
            next(rest, None)  # so that it counts them

        try:
            write_files(directory, write, output=os.fspath(self.files[0]))
        except tf.errors.OpError as error:  # TensorFlow's words for a full disk
            raise UserError(f"--output={self.files[0]}: {final_names(error.message)}") from error
        return f"{total} images in {name_files(self.files)}, with indexes"

    def _record(self, sample: Sample) -> bytes:
        picture = self.encoding.picture(sample)
        height, width = picture.shape[:2]
        features = {
            "image/encoded": bytes_feature([self.encoding.encode(picture)]),
            "image/format": bytes_feature([self.encoding.image_format.encode()]),
            "image/filename": bytes_feature([os.fsencode(sample.name)]),
            "image/source_id": bytes_feature([str(sample.position).encode()]),
            "image/height": integers_feature([height]),
            "image/width": integers_feature([width]),
        }
        if self.has_labels:
            features["image/class/label"] = integers_feature([sample.label])
        if self.label_names:
            name = label_name(sample.label, self.label_names)
            features["image/class/text"] = bytes_feature([name.encode()])
        example = tf.train.Example(features=tf.train.Features(feature=features))
        return example.SerializeToString(deterministic=True)  # protobuf's maps have no order unless asked


def record_files(output: str, num_shards: int | None) -> list[pathlib.Path]:
    """The files of --output: itself, or the shards of which it is the prefix."""
    if num_shards is None:
        return [pathlib.Path(output)]
    prefix = output.removesuffix(SUFFIX)
    return [pathlib.Path(f"{prefix}-{i:05d}-of-{num_shards:05d}{SUFFIX}") for i in range(num_shards)]
