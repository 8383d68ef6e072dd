"""After the loader has stopped: which image it was."""

import shutil

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common import tfrecord
from common.datacheck import datasets
from common.datacheck.datasets import open_coco, open_tfrecords
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.datasets import CocoSource, ImageListSource
from common.errors import UserError
from tests.common.image_variants import pillow

NOISE = np.random.default_rng(5).integers(0, 256, (60, 151, 3), np.uint8)
ERROR = tf.errors.InternalError(
    None,
    None,
    "Critical error in pipeline:\n  Error in CPU operator `decoders.image`\nFailed to decode sample #3",
)


def damaged(jpeg: bytes) -> bytes:
    """Damage that neither header nor end shows."""
    middle = len(jpeg) * 2 // 3
    return jpeg[:middle] + b"\xff\xd9" + bytes(60) + jpeg[middle + 62 :]


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))


@pytest.fixture
def data(drawn, tmp_path):
    shutil.copytree(drawn, tmp_path / "data")
    return tmp_path / "data"


def coco(data, **policy) -> CocoSource:
    source = open_coco(str(data / "images"), str(data / "instances.json"), ImagePolicy(**policy))
    assert source.annotations.num_images
    return source


def test_damage_is_found_by_file_and_id(data):
    path = data / "images/01.jpg"
    path.write_bytes(damaged(path.read_bytes()))
    (data / "images/04.jpg").write_bytes(damaged((data / "images/04.jpg").read_bytes()))
    source = coco(data)  # it was opened without a word
    error = datasets.explain(ERROR, source, "dali_cpu")
    assert isinstance(error, DataError)
    for words in (
        "instances.json: image with damaged data (2)",
        "image 13 ('01.jpg')",
        "image 22 ('04.jpg')",
    ):
        assert words in str(error)
    assert "decoders.image" not in str(error)


def test_files_that_changed_after_the_start(data):
    source = coco(data)
    (data / "images/00.jpg").unlink()
    (data / "images/03.jpg").write_bytes((data / "images/03.jpg").read_bytes()[:-1])
    said = str(datasets.explain(ERROR, source, "dali_cpu"))
    assert "missing image file: image 10 ('00.jpg')" in said
    assert "image that is cut off: image 19 ('03.jpg')" in said


def test_images_that_were_left_out_are_not_blamed(data):
    (data / "images/00.jpg").write_bytes(b"")
    source = coco(data, on_bad_image="skip")
    assert str(datasets.explain(ERROR, source, "dali_cpu")).startswith("the loader (dali_cpu) stopped")
    (data / "images/01.jpg").write_bytes(damaged((data / "images/01.jpg").read_bytes()))
    said = str(datasets.explain(ERROR, source, "dali_cpu"))
    assert "'01.jpg'" in said and "'00.jpg'" not in said


def test_where_all_is_well_the_loader_is_quoted(data):
    for pipeline_type in ("dali_cpu", "tensorflow"):
        said = str(datasets.explain(ERROR, coco(data), pipeline_type))
        assert said == f"the loader ({pipeline_type}) stopped: Error in CPU operator `decoders.image`"
    said = datasets.explain(RuntimeError(""), None, "synthetic")
    assert str(said) == "the loader (synthetic) stopped: " and type(said) is UserError


def test_plain_tensorflow_and_another_format(data):
    with PIL.Image.open(data / "images/02.jpg") as image:
        image.save(data / "images/02.jpg", "WEBP")
    said = str(datasets.explain(ERROR, coco(data), "tensorflow"))
    assert (
        said == "--pipeline_type=tensorflow reads JPEG and PNG, and image 16 ('02.jpg') is WEBP: use dali_cpu"
    )
    assert "stopped" in str(datasets.explain(ERROR, coco(data), "dali_cpu"))


def test_a_list_of_images(data, tmp_path, monkeypatch):
    other = tmp_path / "other.jpg"
    other.write_bytes(pillow("JPEG", NOISE))
    monkeypatch.chdir(tmp_path)
    source = ImageListSource(("data/images/00.jpg", str(other), "data/images/11.png"))
    assert "stopped" in str(datasets.explain(ERROR, source, "dali_cpu"))
    other.write_bytes(damaged(other.read_bytes()))
    error = datasets.explain(ERROR, source, "dali_cpu")
    assert isinstance(error, DataError) and f"{str(other)!r}: " in str(error) and "00.jpg" not in str(error)
    other.write_bytes(pillow("WEBP", NOISE))
    said = str(datasets.explain(ERROR, source, "tensorflow"))
    assert f"{str(other)!r} is WEBP" in said


def _rewrite(file, number: int, change) -> None:
    """Replaces the image in a record by another of the same length, and keeps the checksums right."""
    offset, size = tfrecord.record_spans(file)[number].tolist()
    content = bytearray(file.read_bytes())
    record = content[offset + 12 : offset + size - 4]
    example = tf.train.Example.FromString(bytes(record))
    encoded = example.features.feature["image/encoded"].bytes_list.value[0]
    at = record.index(encoded)
    record[at : at + len(encoded)] = change(encoded)
    content[offset + 12 : offset + size - 4] = record
    content[offset : offset + size] = tfrecord.framed(bytes(record))
    file.write_bytes(content)


def test_records(drawn_records, tmp_path):
    for path in drawn_records.parent.iterdir():
        shutil.copy(path, tmp_path)
    file = sorted(tmp_path.glob("*.tfrecord"))[1]
    _rewrite(file, 2, lambda encoded: encoded)
    source = open_tfrecords(str(tmp_path / "*.tfrecord"))
    assert source.size == 12
    assert "stopped" in str(datasets.explain(ERROR, source, "dali_cpu"))
    _rewrite(file, 2, damaged)
    source = open_tfrecords(str(tmp_path / "*.tfrecord"))
    assert source.size == 12
    records = tf.data.TFRecordDataset(str(file)).skip(2).as_numpy_iterator()
    image_id = (
        tf.train.Example.FromString(next(records)).features.feature["image/source_id"].bytes_list.value[0]
    )
    said = str(datasets.explain(ERROR, source, "dali_cpu"))
    assert "image with damaged data" in said
    assert f"{file.name} record 2 (image {image_id.decode()})" in said


def test_plain_tensorflow_and_another_format_in_records(drawn_records, monkeypatch):
    source = open_tfrecords(f"{drawn_records}-*.tfrecord")
    assert "stopped" in str(datasets.explain(ERROR, source, "tensorflow"))
    monkeypatch.setattr(type(source), "encoded", lambda *_: pillow("WEBP", NOISE))
    said = str(datasets.explain(ERROR, source, "tensorflow"))
    assert "reads JPEG and PNG, and " in said and "record 0 (image " in said and "is WEBP" in said
    assert "stopped" in str(datasets.explain(ERROR, source, "dali_cpu"))
