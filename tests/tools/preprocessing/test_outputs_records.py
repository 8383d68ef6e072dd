"""Records of preprocessed images, read back by tf.data, by DALI and by this project's own checks."""

import numpy as np
import nvidia.dali.tfrecord as dali_tfrecord
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types

from common import tfrecord
from common.errors import UserError
from tests.tools.preprocessing.samples import images, left, output, samples

NAMES = ["cats/a.jpg", "../b ü.png", "cats/a.jpg", "key", "\udcff.jpg"]


def written(directory, of, **options):
    """Writes records of labelled images; returns the files."""
    out = output(directory / "x.tfrecord", has_labels=True, label_names={0: "cat", 1: "dog"}, **options)
    out.write(samples(of, NAMES[: len(of)], [0, 1, -1, 5, 0][: len(of)]), len(of))
    return sorted(str(file) for file in directory.glob("*.tfrecord"))


def test_tf_data_reads_what_was_written(tmp_path):
    of = [images(1, (20 + i, 31, 3))[0] for i in range(5)]
    files = written(tmp_path, of)
    features = {
        "image/encoded": tf.io.FixedLenFeature((), tf.string),
        "image/format": tf.io.FixedLenFeature((), tf.string),
        "image/filename": tf.io.FixedLenFeature((), tf.string),
        "image/height": tf.io.FixedLenFeature((), tf.int64),
        "image/width": tf.io.FixedLenFeature((), tf.int64),
        "image/class/label": tf.io.FixedLenFeature((), tf.int64),
        "image/class/text": tf.io.FixedLenFeature((), tf.string),
    }
    records = [tf.io.parse_single_example(r, features) for r in tf.data.TFRecordDataset(files)]
    for image, record in zip(of, records, strict=True):
        np.testing.assert_array_equal(tf.io.decode_png(record["image/encoded"]), image)
        assert (record["image/height"], record["image/width"]) == image.shape[:2]
        assert record["image/format"] == b"png"
    assert [r["image/class/label"].numpy() for r in records] == [0, 1, -1, 5, 0]
    assert [r["image/class/text"].numpy() for r in records] == [b"cat", b"dog", b"", b"", b"cat"]
    expected = [b"cats/a.jpg", "../b ü.png".encode(), b"cats/a.jpg", b"key", b"\xff.jpg"]
    assert [r["image/filename"].numpy() for r in records] == expected


@pytest.mark.parametrize(("image_format", "tolerance"), [("png", 0), ("jpeg", 6)])
def test_dali_reads_what_was_written_by_the_index_beside_it(tmp_path, image_format, tolerance):
    ramp = np.arange(24, dtype=np.uint8)[:, None, None] + np.array([0, 60, 120], np.uint8)
    of = [np.repeat(ramp + np.uint8(20 * i), 40, axis=1) for i in range(5)]  # smooth, as JPEG likes it
    files = written(tmp_path, of, output_shards=2, image_format=image_format)
    pipeline = dali.Pipeline(batch_size=5, num_threads=1, device_id=None)
    with pipeline:
        record = fn.readers.tfrecord(
            path=files,
            index_path=[f"{file}.idx" for file in files],
            features={
                "image/encoded": dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
                "image/class/label": dali_tfrecord.FixedLenFeature((1,), dali_tfrecord.int64, -1),
            },
        )
        decoded = fn.decoders.image(record["image/encoded"], output_type=types.RGB)
        pipeline.set_outputs(decoded, record["image/class/label"])
    found, labels = pipeline.run()
    for i, image in enumerate(of):
        np.testing.assert_allclose(found.at(i).astype(int), image, atol=tolerance)
    assert np.ravel(labels.as_array()).tolist() == [0, 1, -1, 5, 0]


@pytest.mark.parametrize(("num_shards", "sizes"), [(None, [5]), (1, [5]), (2, [2, 3]), (5, [1] * 5)])
def test_shards_are_equal_parts_in_order(tmp_path, num_shards, sizes):
    files = written(tmp_path, images(5), output_shards=num_shards)
    assert [len(tfrecord.record_spans(file)) for file in files] == sizes
    for file in files:
        with open(f"{file}.idx", "rb") as index:
            assert index.read() == tfrecord.format_index(tfrecord.record_spans(file))
    ids = [
        tf.train.Example.FromString(record.numpy()).features.feature["image/source_id"].bytes_list.value[0]
        for record in tf.data.TFRecordDataset(files)
    ]
    assert ids == [b"0", b"1", b"2", b"3", b"4"]
    if num_shards == 2:
        assert left(tmp_path) == [
            f"x-0000{shard}-of-00002.tfrecord{suffix}" for shard in (0, 1) for suffix in ("", ".idx")
        ]


def test_without_labels_records_have_none(tmp_path):
    output(tmp_path / "x.tfrecord").write(samples(images(1)), 1)
    (record,) = tf.data.TFRecordDataset(str(tmp_path / "x.tfrecord"))
    keys = set(tf.train.Example.FromString(record.numpy()).features.feature)
    names = ("encoded", "format", "filename", "source_id", "height", "width")
    assert keys == {f"image/{name}" for name in names}


def test_more_shards_than_images_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"--output_shards=3 is not in 1\.\.2"):
        output(tmp_path / "x.tfrecord", output_shards=3).write(samples(images(2)), 2)
    assert left(tmp_path) == []


def test_another_set_of_this_prefix_is_in_the_way(tmp_path):
    output(tmp_path / "x.tfrecord", output_shards=2).write(samples(images(2)), 2)
    with pytest.raises(UserError, match="another set"):
        output(tmp_path / "x.tfrecord", output_shards=1)
    with pytest.raises(UserError, match="--overwrite"):
        output(tmp_path / "x.tfrecord", output_shards=2)
