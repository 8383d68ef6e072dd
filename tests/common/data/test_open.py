import dataclasses
import json
import shutil

import numpy as np
import PIL.Image
import pytest

from common.args import Args, EvalArgs, ImagePolicy
from common.data import tf_readers
from common.data.check.issues import DataError, Issues
from common.data.check.tfrecord import TFRecordSource
from common.data.coco import CocoSource, load_coco
from common.data.labels import LabelMap
from common.data.open import (
    check_shuffle,
    list_images,
    log_source,
    open_data,
    open_evaluation,
    open_images,
    open_source,
    open_splits,
)
from common.data.sources import ImageListSource
from common.distributed.ranks import Ranks
from common.errors import UserError
from tests.common.coco_documents import SMALL, changed, draw_images, write_json
from tests.common.record_writing import png, record, write, write_tfrecords
from tests.common.shard_writing import write_shards
from tests.refusal import refusal

CATEGORIES = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


@pytest.fixture
def coco_flags(drawn):
    return {"images": str(drawn / "images"), "annotations": str(drawn / "instances.json")}


@pytest.fixture
def image_list(drawn):
    return ImageListSource(list_images(str(drawn / "images"), Issues("")))


# --- sources ---


def test_coco_and_tfrecord_sources_of_the_same_images_have_equal_content(drawn, drawn_records, coco_flags):
    flags = {**coco_flags, "file_pattern": f"{drawn_records}-*"}
    coco, tfrecord = (open_source(**flags, input_type=name) for name in ("coco", "tfrecord"))
    assert isinstance(coco, CocoSource) and isinstance(tfrecord, TFRecordSource)
    for source, name in ((coco, "coco"), (tfrecord, "tfrecord")):
        assert (source.name, source.size, source.label_map) == (name, 12, CATEGORIES)
    files = {int(i): coco.encoded(row) for row, i in enumerate(coco.annotations.image_ids)}
    assert files[10] == (drawn / "images" / "00.jpg").read_bytes()
    assert {int(i): tfrecord.encoded(row) for row, i in enumerate(tfrecord.annotations.image_ids)} == files


@pytest.fixture
def shards(drawn, coco_flags, tmp_path):
    """The pattern of two WebDataset shards with the images of `coco_flags`."""
    annotations = open_source(**coco_flags).annotations
    write_shards(annotations, drawn / "images", tmp_path / "drawn", num_shards=2)
    return f"{tmp_path}/drawn-*.tar"


def test_webdataset_source_has_the_content_of_the_coco_source(shards, coco_flags):
    coco, source = open_source(**coco_flags), open_source(file_pattern=shards)
    assert (source.name, source.size, source.label_map) == ("webdataset", 12, CATEGORIES)
    expected, actual = coco.annotations, source.annotations
    for row, image_id in enumerate(actual.image_ids.tolist()):
        row_of_coco = expected.image_ids.tolist().index(image_id)
        assert source.encoded(row) == coco.encoded(row_of_coco)
        assert actual.file_names[row] == expected.file_names[row_of_coco]
        for name in ("boxes_ltwh_px", "category_ids", "is_crowd", "areas"):
            values, desired = (
                getattr(annotations, name)[slice(*annotations.row_splits[i : i + 2])].tolist()
                for annotations, i in ((actual, row), (expected, row_of_coco))
            )
            assert values == desired


@pytest.mark.parametrize("with_suffix", [True, False])
def test_tar_files_are_webdataset_by_their_name_or_first_block(shards, tmp_path, with_suffix):
    (tmp_path / "new").mkdir()
    for path in tmp_path.glob("drawn-*.tar"):
        path.rename(tmp_path / "new" / (path.name if with_suffix else path.stem))
    flags = {"file_pattern": f"{tmp_path}/new/*", "label_map": f"{tmp_path}/drawn.label_map.json"}
    assert open_source(**flags).name == open_source(**flags, input_type="webdataset").name == "webdataset"
    message = refusal(open_source, **flags, input_type="tfrecord", error=DataError)
    assert "it is a tar archive" in message


def test_numbers_in_braces_select_shards_and_missing_ones_are_refused(shards, tmp_path):
    def pattern(last):
        return f"{tmp_path}/drawn-{{00000..{last:05d}}}-of-00002.tar"

    assert open_source(file_pattern=pattern(1)).size == 12
    missing = f"no file matches: '{tmp_path}/drawn-00002-of-00002.tar'"
    assert missing in refusal(open_source, file_pattern=pattern(2), error=DataError)
    reverse = f"{tmp_path}/drawn-{{5..2}}.tar"
    assert f"no file matches: '{reverse}'" in refusal(open_source, file_pattern=reverse, error=DataError)


def test_file_pattern_of_images_or_of_a_json_is_refused_with_what_they_are(drawn):
    image = min((drawn / "images").iterdir())
    message = refusal(open_source, file_pattern=f"{drawn}/images/*")
    assert message.startswith(f"{image} is an image: the pattern is for TFRecords or WebDataset; for image")
    file = f"{drawn}/instances.json"
    message = refusal(open_source, file_pattern=file, error=DataError)
    assert f"no file matches: '{file}' ('{file}' has no records)" in message


def test_file_pattern_of_shards_and_records_together_is_refused(shards, copied_records, tmp_path):
    message = refusal(open_source, file_pattern=f"{shards},{copied_records}")
    first = f"{tmp_path}/a/drawn-00000-of-00003.tfrecord"
    assert f"drawn-00000-of-00002.tar is WebDataset, but {first} is not: give a pattern of one" in message


def test_label_map_of_shards_is_named_as_the_shards_without_their_numbers(shards, tmp_path):
    for name, number in (("x", "-000007"), ("y", "")):
        shutil.copy(tmp_path / "drawn-00000-of-00002.tar", tmp_path / f"{name}{number}.tar")
        shutil.copy(tmp_path / "drawn.label_map.json", tmp_path / f"{name}.label_map.json")
        assert open_source(file_pattern=f"{tmp_path}/{name}*.tar").label_map == CATEGORIES
    (tmp_path / "x.label_map.json").unlink()
    message = refusal(open_source, file_pattern=f"{tmp_path}/x*.tar")
    assert f"no label map next to {tmp_path}/x-000007.tar ({tmp_path}/x.label_map.json): give" in message


def test_directory_in_place_of_a_file_pattern_is_refused_with_an_example_of_a_pattern(shards, tmp_path):
    expected = f"{tmp_path} is a directory: give a pattern of its files, such as '{tmp_path}/*.tar' or"
    assert expected in refusal(open_source, file_pattern=str(tmp_path))


def test_image_list_source_has_no_classes_and_no_boxes(image_list):
    assert (image_list.name, image_list.size) == ("images", 12)
    assert not image_list.label_map.num_classes and not image_list.annotations.num_boxes


@pytest.mark.parametrize("read", [ImageListSource.read, tf_readers.examples], ids=["dali", "tensorflow"])
def test_image_list_source_is_refused_for_training(image_list, read):
    with pytest.raises(ValueError, match="cannot be used for training"):
        read(image_list, shard_id=0, num_shards=1, training=True, seed=0)


def test_fingerprint_of_coco_source_is_that_of_its_annotations(drawn, coco_flags):
    assert open_source(**coco_flags).fingerprint == load_coco(drawn / "instances.json", None).fingerprint()


def test_fingerprint_of_records_depends_on_their_order_but_not_on_their_path(
    drawn, drawn_records, coco_flags, tmp_path
):
    fingerprint = open_source(file_pattern=f"{drawn_records}*").fingerprint
    shutil.copytree(drawn_records.parent, tmp_path / "moved")
    assert open_source(file_pattern=f"{tmp_path}/moved/*").fingerprint == fingerprint
    annotations = open_source(**coco_flags).annotations
    write_tfrecords(annotations, drawn / "images", tmp_path / "reordered", num_shards=3, seed=1)
    assert open_source(file_pattern=f"{tmp_path}/reordered*").fingerprint != fingerprint


def test_fingerprint_of_image_list_depends_on_the_files(image_list):
    assert image_list.fingerprint != ImageListSource(image_list.files[:-1]).fingerprint


# --- flags of one data set ---

COCO_FLAGS = {"images": "/nowhere", "annotations": "/nowhere.json"}
BAD_FLAGS = {
    "none": ({}, "no data: give --eval_images and --eval_annotations .COCO., or --eval_file_pattern"),
    "images only": ({"images": "a"}, "--eval_images is given without --eval_annotations"),
    "annotations only": ({"annotations": "a"}, "--eval_annotations is given without --eval_images"),
    "records and coco": (COCO_FLAGS | {"file_pattern": "c"}, "--eval_file_pattern .* and --eval_images .*"),
    "records and json": ({"annotations": "b", "file_pattern": "c"}, "--eval_annotations .COCO. are both"),
    "coco as tfrecord": (COCO_FLAGS | {"input_type": "tfrecord"}, "needs --eval_file_pattern"),
    "records as coco": ({"input_type": "coco", "file_pattern": "c"}, "no data: give --eval_images"),
    "missing records": ({"file_pattern": "/nowhere/x*"}, r"^/nowhere/x\*: no file matches: '/nowhere/x\*'"),
    "missing json": (COCO_FLAGS, "/nowhere.json: .*No such file"),
}


@pytest.mark.parametrize(("flags", "reason"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_bad_combination_of_data_flags_is_refused_with_their_names(flags, reason):
    with pytest.raises(UserError, match=reason):
        open_source(**flags, split="eval")


@pytest.fixture
def copied_records(drawn_records, tmp_path):
    """The pattern of a copy of the records with its label map, in the directory a of `tmp_path`."""
    shutil.copytree(drawn_records.parent, tmp_path / "a")
    return f"{tmp_path}/a/*.tfrecord"


def test_different_label_maps_next_to_records_are_refused(drawn_records, copied_records, tmp_path):
    shutil.copytree(drawn_records.parent, tmp_path / "b")
    LabelMap((3, 17, 90), ("bus", "cat", "toothbrush")).save(tmp_path / "b" / "drawn.label_map.json")
    pattern = f"{copied_records},{tmp_path}/b/*.tfrecord"
    assert "differ: give --label_map" in refusal(open_source, file_pattern=pattern)


def test_records_without_label_map_need_the_flag_label_map(copied_records, tmp_path):
    (tmp_path / "a" / "drawn.label_map.json").rename(tmp_path / "labels.json")
    with pytest.raises(UserError, match=r"no label map next to .*drawn.label_map.json.*--label_map=FILE"):
        open_source(file_pattern=copied_records)
    source = open_source(file_pattern=copied_records, label_map=str(tmp_path / "labels.json"))
    assert source.label_map == CATEGORIES


def test_label_map_flag_replaces_the_label_map_next_to_records(copied_records, tmp_path):
    (tmp_path / "labels.pbtxt").write_text("item { id: 3 name: 'car' }")
    with pytest.raises(UserError, match=r"unknown category.*label 17"):
        open_source(file_pattern=copied_records, label_map=str(tmp_path / "labels.pbtxt"))


# --- lists of images ---


def test_image_list_has_the_image_files_of_a_directory_a_glob_or_one_path(tmp_path):
    for name in ("b.JPG", "a.png", "c.txt", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "d.jpg").mkdir()
    images = (f"{tmp_path}/a.png", f"{tmp_path}/b.JPG")
    for pattern, expected in ((tmp_path, images), (f"{tmp_path}/*.[Jp]*", images), (images[1], images[1:])):
        assert list_images(str(pattern), Issues("")) == expected


def test_image_list_names_what_it_skips_in_a_directory(tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("a.jpg", "b.jfif", "c.gif", "clip.3gp", "._a.jpg", "more/d.jpg"):
        (tmp_path / name).touch()
    issues = Issues("")
    assert list_images(str(tmp_path), issues) == (f"{tmp_path}/a.jpg", f"{tmp_path}/b.jfif")
    assert {issue.kind: [text.rpartition("/")[2] for text in issue.offenders] for issue in issues} == {
        "file-hidden": ["._a.jpg'"],
        "folder-skipped": ["more'"],
        "format-skipped": ["c.gif'"],
        "video-skipped": ["clip.3gp'"],
    }


def test_image_list_of_a_glob_skips_system_folders_and_has_files_of_circular_links_once(
    tmp_path,
):
    for folder in ("z", "@eaDir"):
        (tmp_path / ".set" / folder).mkdir(parents=True)
        (tmp_path / ".set" / folder / "a.jpg").touch()
    (tmp_path / ".set" / "loop").symlink_to(".")
    issues = Issues("")
    assert list_images(f"{tmp_path}/.set/**/*", issues) == (f"{tmp_path}/.set/z/a.jpg",)
    assert issues["file-hidden"].offenders == [f"'{tmp_path}/.set/@eaDir'"]


def test_image_list_without_image_files_is_refused_with_a_reason(tmp_path):
    assert "File name too long" in refusal(list_images, ",".join(["a.png"] * 60), Issues(""))
    missing = str(tmp_path / "nothing")
    assert refusal(list_images, missing, Issues("--images=x")) == "--images=x: no such file or directory"
    assert refusal(list_images, str(tmp_path), Issues("--images=x")).startswith(
        "--images=x: no image files found"
    )
    (tmp_path / "a.heic").touch()
    assert "image or video that is not read: " in refusal(list_images, str(tmp_path), Issues(""))


def test_paths_in_the_images_flag_are_relative_to_the_working_directory(drawn, monkeypatch):
    monkeypatch.chdir(drawn / "images")
    for images, count in (("00.jpg", 1), ("./00.jpg", 1), ("*.jpg", 11), ("**/*.jpg", 11), (".", 12)):
        assert open_images(images).size == count, images


# --- logs, splits and categories ---


def test_log_of_a_data_set_has_its_summary_and_only_issues_that_the_summary_lacks(coco_flags, capsys):
    source = open_source(**coco_flags)
    issues = source.annotations.issues
    assert isinstance(issues, Issues)
    issues.add("exif-turn", "image 7 ('a.jpg') has EXIF orientation 6")
    issues.add("many-objects", "image 7 ('a.jpg') has 300 of 'cat'")  # evaluation logs it
    log_source("training", source)
    log = capsys.readouterr().err
    assert "training data: 12 images" in log and "image 7 ('a.jpg') has EXIF orientation 6" in log
    assert "reaches outside" in log and "crowd (" not in log
    assert "300 of" not in log


@pytest.fixture
def split_flags(coco_flags):
    return {f"{split}_{flag}": path for split in ("train", "eval") for flag, path in coco_flags.items()}


def test_training_and_evaluation_data_are_opened_and_logged(split_flags, capsys):
    data = open_data(Args(batch_size=6, **split_flags), Ranks(), max_instances=100)
    assert (data.train.size, data.evaluation.size, data.num_classes) == (12, 12, 3)
    log = capsys.readouterr().err
    assert "training data: 12 images" in log and "evaluation data: 12 images" in log


def test_patience_without_evaluation_data_is_logged_and_label_map_with_coco_is_refused(split_flags, capsys):
    train = {name: value for name, value in split_flags.items() if name.startswith("train_")}
    open_data(Args(batch_size=6, patience=3, **train), Ranks(), max_instances=100)
    assert "no evaluation data: --patience has no effect" in capsys.readouterr().err
    with pytest.raises(UserError, match="--label_map=x has no effect: a COCO json has its own class names"):
        open_data(Args(batch_size=6, label_map="x", **train), Ranks(), max_instances=100)


def test_synthetic_pipeline_opens_no_data_set_and_has_numbered_classes():
    data = open_data(Args(pipeline_type="synthetic"), Ranks(), max_instances=100, synthetic_classes=7)
    assert (data.train, data.evaluation, data.num_classes, data.label_map.num_classes) == (None, None, 7, 7)


def test_batch_of_all_ranks_larger_than_the_data_set_is_refused(split_flags):
    with pytest.raises(UserError, match=r"12 images.*--batch_size=7 x 2 ranks"):
        open_splits(Args(batch_size=7, **split_flags), num_replicas=2, max_instances=100)


def test_evaluation_category_unknown_to_the_weights_is_refused(split_flags):
    a = Args(**split_flags)
    assert open_evaluation(a, CATEGORIES).size == 12
    with pytest.raises(UserError, match="category 3 is 'car', in training it is absent"):
        open_evaluation(a, LabelMap((17,), ("cat",)))


# --- training and evaluation data together ---


def test_evaluation_images_with_the_content_of_training_images_are_a_warning(tmp_path, capfd):
    (tmp_path / "train").mkdir()
    images = draw_images(tmp_path / "train")
    shutil.copytree(images, tmp_path / "val")
    (tmp_path / "val" / "a.jpg").rename(tmp_path / "val" / "c.jpg")
    document = changed(["images", 0, "file_name"], "c.jpg")
    flags = {"train_annotations": write_json(images, SMALL), "eval_annotations": tmp_path / "val.json"}
    flags["eval_annotations"].write_text(json.dumps(document))
    flags |= {"train_images": images, "eval_images": tmp_path / "val"}
    args = Args(batch_size=1, **{name: str(path) for name, path in flags.items()})
    _, evaluation = open_splits(args, num_replicas=1, max_instances=100)
    shared = "image 42 ('c.jpg') = image 42 ('a.jpg')", "image 7 ('sub/b.jpg') = image 7 ('sub/b.jpg')"
    assert sorted(evaluation.annotations.issues["shared-image"].offenders) == sorted(shared)
    assert "evaluation image that is also in the training data (2): image" in capfd.readouterr().err


def test_evaluation_records_with_images_of_the_training_records_are_a_warning(tmp_path):
    files = {}
    for split, colors in (("train", ("red", "blue")), ("eval", ("green", "red"))):
        encoded = [record(source_id=b"%d" % i, encoded=png(color=color)) for i, color in enumerate(colors)]
        files[split] = write(tmp_path / f"{split}.tfrecord", *encoded)
    LabelMap((17,), ("cat",)).save(tmp_path / "labels.json")
    flags = {f"{split}_file_pattern": file for split, file in files.items()}
    args = Args(batch_size=1, label_map=str(tmp_path / "labels.json"), **flags)
    _, evaluation = open_splits(args, num_replicas=1, max_instances=100)
    pair = f"{files['eval']} record 1 (image 1) = {files['train']} record 0 (image 0)"
    assert evaluation.annotations.issues["shared-image"].offenders == [pair]


def test_shared_images_of_coco_and_tfrecord_data_are_logged_as_not_looked_for(
    coco_flags, drawn_records, capfd
):
    flags = {f"train_{name}": value for name, value in coco_flags.items()}
    args = Args(batch_size=1, eval_file_pattern=f"{drawn_records}-*", **flags)
    _, evaluation = open_splits(args, num_replicas=1, max_instances=100)
    assert not evaluation.annotations.issues["shared-image"].count
    assert (
        "images that are in both the training and the evaluation data: not looked for"
        in capfd.readouterr().err
    )


def test_box_areas_replace_the_areas_of_the_evaluation_data(tmp_path):
    images = draw_images(tmp_path)
    flags = {"eval_images": str(images), "eval_annotations": str(write_json(images, SMALL))}
    label_map = LabelMap((2, 9), ("two", "nine"))
    for box_areas, areas in ((False, [99, 30, 12.5, 4]), (True, [200, 30, 14, 4])):
        source = open_evaluation(EvalArgs(**flags, box_areas=box_areas), label_map)
        assert source.annotations.areas.tolist() == areas


def test_box_areas_replace_the_areas_of_evaluation_records(tmp_path):
    file = write(tmp_path / "a.tfrecord", record(object__area=[7.0]))
    label_map = LabelMap((17,), ("cat",))
    label_map.save(tmp_path / "a.label_map.json")
    for box_areas, area in ((False, 7), (True, 1200)):
        source = open_evaluation(EvalArgs(eval_file_pattern=file, box_areas=box_areas), label_map)
        np.testing.assert_allclose(source.annotations.areas, [area], rtol=1e-6)
        # The warning advises --box_areas.
        assert ("area-differs" in [issue.kind for issue in source.annotations.issues]) != box_areas


def test_coco_pixels_decides_about_boxes_of_turned_images_in_training_and_evaluation(tmp_path):
    image = PIL.Image.new("RGB", (40, 20))
    image.getexif()[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=image.getexif())
    records = {"images": [{"id": 1, "file_name": "a.jpg", "width": 40, "height": 20}]}
    records["annotations"] = [{"image_id": 1, "category_id": 2, "bbox": [3, 10, 5, 18]}]
    path = str(write_json(tmp_path, SMALL | records))
    flags = {"train_images": str(tmp_path), "train_annotations": path, "batch_size": 1}
    flags |= {"eval_images": str(tmp_path), "eval_annotations": path}
    message = refusal(open_splits, Args(**flags), num_replicas=1, max_instances=100, error=DataError)
    assert message.count("Set --coco_pixels to turned, or to stored") == 2
    sources = open_splits(Args(**flags, coco_pixels="turned"), num_replicas=1, max_instances=100)
    # Orientation 6 turns the stored image clockwise: x = 19 - y, y = x of the stored pixels.
    assert [source.annotations.boxes_ltwh_px.tolist() for source in sources] == [[[10, 12, 18, 5]]] * 2


def test_check_of_no_image_file_opens_coco_data_with_a_missing_image_and_is_refused_for_records(
    drawn, tmp_path, copied_records, capfd
):
    shutil.copytree(drawn / "images", tmp_path / "images")
    (tmp_path / "images" / "02.jpg").unlink()
    flags = {"train_images": str(tmp_path / "images"), "train_annotations": str(drawn / "instances.json")}
    a = Args(**flags, batch_size=1)
    message = refusal(open_splits, a, num_replicas=1, max_instances=100, error=DataError)
    assert "02.jpg" in message
    a = dataclasses.replace(a, check="none")
    assert open_splits(a, num_replicas=1, max_instances=100)[0].size == 12
    assert "image file that was not checked (12): image 10 ('00.jpg'); " in capfd.readouterr().err
    flags = {"eval_file_pattern": copied_records, "check": "none"}
    assert "--check=none has no effect" in refusal(open_evaluation, EvalArgs(**flags), CATEGORIES)


def test_coco_pixels_is_refused_for_records_and_does_not_change_their_check(copied_records):
    flags = {"eval_file_pattern": copied_records, "coco_pixels": "turned"}
    assert "--coco_pixels=turned has no effect" in refusal(open_evaluation, EvalArgs(**flags), CATEGORIES)
    policy = ImagePolicy(coco_pixels="turned")
    assert open_source(file_pattern=copied_records, policy=policy).size == 12


@pytest.mark.parametrize("writer", [write_tfrecords, write_shards])
def test_fewer_record_files_than_ranks_are_a_warning_with_shuffle_buffer(drawn, tmp_path, writer, capsys):
    annotations = load_coco(drawn / "instances.json", drawn / "images")
    writer(annotations, drawn / "images", tmp_path / "t", num_shards=3)
    annotations.label_map.save(tmp_path / "t.label_map.json")
    source = open_source(file_pattern=f"{tmp_path}/t-*-of-*")
    capsys.readouterr()
    check_shuffle(Args(), source, num_replicas=4)
    check_shuffle(Args(shuffle="buffer"), source, num_replicas=3)
    assert capsys.readouterr().err == ""
    check_shuffle(Args(shuffle="buffer"), source, num_replicas=4)
    assert "fewer record files than ranks: 3 files, 4 ranks. " in capsys.readouterr().err


def test_shuffle_buffer_is_refused_where_it_has_no_effect(drawn_records, coco_flags):
    a = Args(shuffle="buffer")
    message = refusal(check_shuffle, a, open_source(**coco_flags), 1)
    assert message.startswith(
        f"--shuffle=buffer has no effect: {coco_flags['annotations']} is always shuffled"
    )
    a = dataclasses.replace(a, pipeline_type="tensorflow")
    message = refusal(check_shuffle, a, open_source(file_pattern=f"{drawn_records}-*.tfrecord"), 1)
    assert message.startswith("--shuffle=buffer has no effect: --pipeline_type=tensorflow")
