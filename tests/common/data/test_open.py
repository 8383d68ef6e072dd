import shutil

import pytest

from common.args import Args
from common.data import tf_readers
from common.data.check.coco import load_coco
from common.data.check.tfrecord import TFRecordSource
from common.data.labels import LabelMap
from common.data.open import (
    list_images,
    log_source,
    open_data,
    open_evaluation,
    open_images,
    open_source,
    open_splits,
)
from common.data.sources import CocoSource, ImageListSource
from common.distributed.ranks import Ranks
from common.errors import UserError
from tests.common.record_writing import write_tfrecords
from tests.refusal import refusal


@pytest.fixture
def coco_flags(drawn):
    return {"images": str(drawn / "images"), "annotations": str(drawn / "instances.json")}


def test_what_sources_say_and_hand_out(drawn, drawn_records, coco_flags):
    given = {**coco_flags, "file_pattern": f"{drawn_records}-*"}
    coco, tfrecord = (open_source(**given, input_type=name) for name in ("coco", "tfrecord"))
    images = ImageListSource(list_images(str(drawn / "images")))
    assert [source.name for source in (coco, tfrecord, images)] == ["coco", "tfrecord", "images"]
    assert [source.size for source in (coco, tfrecord, images)] == [12, 12, 12]
    assert coco.label_map == tfrecord.label_map == LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))
    assert coco.label_map == LabelMap.load(coco_flags["annotations"])
    assert not images.label_map.num_classes and not images.annotations.num_boxes
    assert isinstance(coco, CocoSource) and isinstance(tfrecord, TFRecordSource)
    files = {int(i): coco.encoded(row) for row, i in enumerate(coco.annotations.image_ids)}
    assert files[10] == (drawn / "images" / "00.jpg").read_bytes()
    assert {int(i): tfrecord.encoded(row) for row, i in enumerate(tfrecord.annotations.image_ids)} == files


def test_fingerprints_tell_data_and_order_apart(drawn, drawn_records, coco_flags, tmp_path):
    coco = open_source(**coco_flags)
    assert coco.fingerprint == load_coco(drawn / "instances.json", None).fingerprint()
    tfrecord = open_source(file_pattern=f"{drawn_records}*")
    shutil.copytree(drawn_records.parent, tmp_path / "moved")
    assert open_source(file_pattern=f"{tmp_path}/moved/*").fingerprint == tfrecord.fingerprint
    write_tfrecords(coco.annotations, drawn / "images", tmp_path / "again", num_shards=3, seed=1)
    assert open_source(file_pattern=f"{tmp_path}/again*").fingerprint != tfrecord.fingerprint
    files = list_images(str(drawn / "images"))
    assert ImageListSource(files).fingerprint != ImageListSource(files[:-1]).fingerprint


@pytest.mark.parametrize("read", [ImageListSource.read, tf_readers.examples])
def test_images_alone_are_nothing_to_train_on(drawn, read):
    source = ImageListSource(list_images(str(drawn / "images")))
    with pytest.raises(ValueError, match="cannot be used for training"):
        read(source, shard_id=0, num_shards=1, training=True, seed=0)


WRONG_FLAGS = [
    ({}, "no data: give --eval_images and --eval_annotations .COCO., or --eval_file_pattern"),
    ({"images": "a"}, "--eval_images is given without --eval_annotations"),
    ({"annotations": "a"}, "--eval_annotations is given without --eval_images"),
    ({"images": "a", "annotations": "b", "file_pattern": "c"}, "--eval_file_pattern .* given"),
    ({"annotations": "b", "file_pattern": "c"}, "and --eval_annotations .COCO. are both given"),
    ({"input_type": "tfrecord", "images": "a", "annotations": "b"}, "needs --eval_file_pattern"),
    ({"input_type": "coco", "file_pattern": "c"}, "no data: give --eval_images"),
    ({"file_pattern": "/nowhere/x*"}, r"^/nowhere/x\*: no file matches: '/nowhere/x\*'"),
    ({"images": "/nowhere", "annotations": "/nowhere.json"}, "/nowhere.json: .*No such file"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_FLAGS)
def test_wrong_flags_are_named(given, message):
    with pytest.raises(UserError, match=message):
        open_source(**given, split="eval")


def test_the_label_map_is_found_or_asked_for_and_one_for_all_files(drawn_records, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(drawn_records.parent, tmp_path / name)
    LabelMap((3, 17, 90), ("bus", "cat", "toothbrush")).save(tmp_path / "b" / "drawn.label_map.json")
    assert "differ: give --label_map" in refusal(open_source, file_pattern=f"{tmp_path}/[ab]/*.tfrecord")
    pattern = f"{tmp_path}/a/*.tfrecord"
    (tmp_path / "a" / "drawn.label_map.json").rename(tmp_path / "labels.json")
    with pytest.raises(UserError, match=r"no label map next to .*drawn.label_map.json.*--label_map=FILE"):
        open_source(file_pattern=pattern)
    found = open_source(file_pattern=pattern, label_map=str(tmp_path / "labels.json"))
    assert found.label_map.names == ("car", "cat", "toothbrush")
    (tmp_path / "labels.pbtxt").write_text("item { id: 3 name: 'car' }")
    with pytest.raises(UserError, match=r"unknown category.*label 17"):
        open_source(file_pattern=pattern, label_map=str(tmp_path / "labels.pbtxt"))


def test_lists_of_images(tmp_path):
    for name in ("b.JPG", "a.png", "c.txt", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "d.jpg").mkdir()
    images = (f"{tmp_path}/a.png", f"{tmp_path}/b.JPG")
    assert list_images(str(tmp_path)) == list_images(f"{tmp_path}/*.[Jp]*") == images
    assert list_images(images[1]) == images[1:]
    assert "File name too long" in refusal(list_images, ",".join(["a.png"] * 60))
    assert "nothing: no such file or directory" in refusal(list_images, str(tmp_path / "nothing"))
    assert "d.jpg: no image files found" in refusal(list_images, str(tmp_path / "d.jpg"))


def test_images_of_the_working_directory(drawn, monkeypatch):
    monkeypatch.chdir(drawn / "images")
    for images, count in (("00.jpg", 1), ("./00.jpg", 1), ("*.jpg", 11), ("**/*.jpg", 11), (".", 12)):
        assert open_images(images).size == count, images


def test_what_is_remarkable_is_said(coco_flags, capsys):
    source = open_source(**coco_flags)
    source.annotations.issues.add("exif-turn", "image 7 ('a.jpg') has EXIF orientation 6")
    log_source("training", source)
    said = capsys.readouterr().err
    assert "training data: 12 images" in said and "image 7 ('a.jpg') has EXIF orientation 6" in said
    assert "reaches outside" in said and "crowd (" not in said


@pytest.fixture
def split_flags(coco_flags):
    return {f"{split}_{flag}": path for split in ("train", "eval") for flag, path in coco_flags.items()}


def test_open_data_returns_both_splits_and_logs_them(split_flags, capsys):
    data = open_data(Args(batch_size=6, **split_flags), Ranks(), max_instances=100)
    assert (data.train.size, data.evaluation.size, data.num_classes) == (12, 12, 3)
    log = capsys.readouterr().err
    assert "training data: 12 images" in log and "evaluation data: 12 images" in log


def test_open_data_synthetic_has_numbered_classes():
    data = open_data(Args(pipeline_type="synthetic"), Ranks(), max_instances=100, synthetic_classes=7)
    assert (data.train, data.evaluation, data.num_classes, data.label_map.num_classes) == (None, None, 7, 7)


def test_batch_larger_than_the_data_is_refused(split_flags):
    with pytest.raises(UserError, match=r"12 images.*--batch_size=7 x 2 ranks"):
        open_splits(Args(batch_size=7, **split_flags), num_replicas=2, max_instances=100)


def test_evaluation_category_unknown_to_the_weights_is_refused(split_flags):
    a = Args(**split_flags)
    assert open_evaluation(a, LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))).size == 12
    with pytest.raises(UserError, match="category 3 is 'car', in training it is absent"):
        open_evaluation(a, LabelMap((17,), ("cat",)))
