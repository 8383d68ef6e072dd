"""Errors of a loader that does not name the file: the images are decoded to find the damaged ones."""

import shutil

import PIL.Image
import pytest
import tensorflow as tf

from common.data.check import loader_errors
from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from common.data.coco import CocoSource
from common.data.open import open_coco, open_images
from common.data.sources import ImageListSource
from common.errors import UserError
from tests.common.image_variants import early_end

REASON = "Critical error in pipeline:\n  Error in CPU operator `decoders.image`\nFailed to decode sample #3"
ERROR = tf.errors.InternalError(None, None, REASON)


def explained(source, pipeline_type="dali_cpu") -> str:
    return str(loader_errors.explain(ERROR, source, pipeline_type))


def damage(path) -> None:
    path.write_bytes(early_end(path.read_bytes()))


@pytest.fixture
def data(drawn, tmp_path):
    """A copy of `drawn` that may be damaged."""
    shutil.copytree(drawn, tmp_path / "data")
    return tmp_path / "data"


def open_data(data, **policy) -> CocoSource:
    return open_coco(data / "images", data / "instances.json", ImagePolicy(**policy))


def test_bad_image_given_for_inference_is_refused_or_left_out_under_policy_skip(data, capsys):
    (data / "images/00.jpg").write_bytes(b"")
    offender = f"--images={data}/images: empty image file: '{data}/images/00.jpg'. "
    with pytest.raises(DataError, match=f"^{offender}Copy"):
        open_images(f"{data}/images")
    assert open_images(f"{data}/images", ImagePolicy("skip")).size == 11
    assert f"{offender}Left out" in capsys.readouterr().err
    with pytest.raises(DataError, match="no usable image: none of the 1 images can be read"):
        open_images(f"{data}/images/00.jpg", ImagePolicy("skip"))


def test_image_file_name_that_is_not_utf_8_is_refused(data):
    (data / "images/01.jpg").rename(data / "images/\udce9.jpg")
    with pytest.raises(DataError, match="DALI needs a file name in UTF-8"):
        open_images(f"{data}/images")


def test_damaged_images_that_caused_a_loader_error_are_named_by_file_and_id(data, capsys):
    damage(data / "images/01.jpg")
    damage(data / "images/04.jpg")
    error = loader_errors.explain(ERROR, open_data(data), "dali_cpu")
    assert isinstance(error, DataError) and "decoders.image" not in str(error)
    assert "decoders.image`\nDecoding the images to find the damaged ones" in capsys.readouterr().err
    for words in ("json: image with damaged data (2)", "image 13 ('01.jpg')", "image 22 ('04.jpg')"):
        assert words in str(error)


def test_image_files_changed_after_the_check_are_named_as_the_cause_of_a_loader_error(data):
    source = open_data(data)
    (data / "images/00.jpg").unlink()
    (data / "images/03.jpg").write_bytes((data / "images/03.jpg").read_bytes()[:-1])
    (data / "images/04.jpg").unlink()
    (data / "images/04.jpg").mkdir()
    message = explained(source)
    assert "missing image file: image 10 ('00.jpg')" in message
    assert "image that is cut off: image 19 ('03.jpg')" in message
    assert "image file that cannot be read: image 22 ('04.jpg'): " in message and "Is a directory" in message


def test_images_left_out_under_policy_skip_are_not_named_as_the_cause_of_a_loader_error(data):
    (data / "images/00.jpg").write_bytes(b"")
    source = open_data(data, on_bad_image="skip")
    assert explained(source).startswith("the loader (dali_cpu) stopped")
    damage(data / "images/01.jpg")
    assert "'01.jpg'" in explained(source) and "'00.jpg'" not in explained(source)


@pytest.mark.parametrize("pipeline_type", ["dali_cpu", "tensorflow"])
def test_loader_error_is_reported_with_its_own_message_if_no_image_is_damaged(data, pipeline_type):
    message = f"the loader ({pipeline_type}) stopped: Error in CPU operator `decoders.image`"
    assert explained(open_data(data), pipeline_type) == message


def test_loader_error_of_synthetic_data_without_a_message_names_the_loader():
    error = loader_errors.explain(RuntimeError(""), None, "synthetic")
    assert str(error) == "the loader (synthetic) stopped: " and type(error) is UserError


def test_webp_image_is_named_as_the_cause_in_a_tensorflow_loader_only(data):
    with PIL.Image.open(data / "images/02.jpg") as image:
        image.save(data / "images/02.jpg", "WEBP")
    message = explained(open_data(data), "tensorflow")
    assert message == (
        "--pipeline_type=tensorflow reads only JPEG and PNG, but image 16 ('02.jpg') is WEBP: use dali_cpu"
    )
    assert "stopped" in explained(open_data(data))


def test_damaged_image_of_an_image_list_is_named_by_its_path(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = ImageListSource(("data/images/00.jpg", str(data / "images/01.jpg"), "data/images/11.png"))
    assert "stopped" in explained(source)
    damage(data / "images/01.jpg")
    message = explained(source)
    assert f"'{data}/images/01.jpg': " in message and "00.jpg" not in message
