"""Opens data with one fault, as train.py does, and valid data, in which no fault is reported.

tests/common/data/check/ tests the check of jsons, images and records in detail.
"""

import gzip
import os

import pytest

from common.data.check.images import ImagePolicy
from common.data.check.issues import KINDS, DataError, Issues, Severity
from common.data.coco import load_coco
from common.data.open import DataFlags, check_sizes, open_pair, open_source
from tests.faults.data_set import CATEGORIES, LFS_POINTER, DataSet
from tests.faults.image_faults import FAULTS
from tools.conversion.coco_to_tfrecord import write_tfrecords
from tools.synthetic import draw_dataset

SKIPPABLE = [fault for fault in FAULTS if KINDS[fault.kind].severity is Severity.IMAGE]
DECODE = ImagePolicy(decode=True)


@pytest.fixture
def data(tmp_path) -> DataSet:
    return DataSet(tmp_path / "data", 1)


@pytest.fixture
def shards(data, tmp_path):
    """A directory with the data set as two TFRecord files, their indexes and a label map."""
    data.write()
    (tmp_path / "shards").mkdir()
    annotations = load_coco(data.json_path)
    write_tfrecords(annotations, data.images_dir, tmp_path / "shards" / "train", num_shards=2)
    return tmp_path / "shards"


def open_data(data: DataSet, policy: ImagePolicy = ImagePolicy()):
    data.write()
    return open_source(str(data.images_dir), str(data.json_path), policy=policy)


def issues_of(data: DataSet, policy: ImagePolicy = ImagePolicy()) -> Issues:
    """Returns the reported issues, even if they are errors. The json is on the disk."""
    try:
        issues = open_source(str(data.images_dir), str(data.json_path), policy=policy).annotations.issues
    except DataError as error:
        (issues,) = error.issues
    assert isinstance(issues, Issues)
    return issues


def assert_reported(kind: str, issues: Issues, *texts: str) -> None:
    """Asserts an issue of this kind with these texts, and no other error."""
    assert [i.kind for i in issues if i.severity is not Severity.WARNING and i.kind != kind] == []
    line = issues[kind].line()
    assert issues[kind].count and [text for text in texts if text not in line] == [], line


# --- one fault ---


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_opening_data_with_a_bad_image_reports_it_and_changes_no_file(data, fault):
    fault.damage(data)
    data.write()

    def snapshot():
        status = {path: path.lstat() for path in data.directory.rglob("*")}
        return {path: (s.st_size, s.st_mtime_ns, s.st_mode) for path, s in status.items()}

    before = snapshot()
    issues = issues_of(data, fault.policy)
    image_name = f"image {data.image['id']} ('{data.image['file_name']}')"
    assert_reported(fault.kind, issues, image_name, fault.text)
    assert issues.origin == str(data.json_path)
    assert snapshot() == before


@pytest.mark.parametrize("fault", SKIPPABLE, ids=lambda fault: fault.name)
def test_data_opened_with_on_bad_image_skip_lack_the_bad_image_and_report_it(data, fault):
    fault.damage(data)
    annotations = open_data(data, ImagePolicy("skip", decode=fault.policy.decode)).annotations
    assert data.image["id"] not in annotations.image_ids
    assert (annotations.num_images, annotations.num_boxes) == (5, 10)
    issue = annotations.issues[fault.kind]
    assert issue.count == 1 and issue.line().endswith(". Left out by --on_bad_image=skip")


def test_data_set_of_bad_images_only_is_refused_with_on_bad_image_skip(data):
    for file in data.images_dir.iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError) as raised:
        open_data(data, ImagePolicy("skip"))
    assert "all 6 images are skipped" in raised.value.issues[0]["no-images"].line()


JSON_CONTENTS = {
    "gzip": ("file-gzip", gzip.compress, "bytes and begins with 1f 8b"),
    "lfs_pointer": ("file-lfs-pointer", lambda content: LFS_POINTER, ""),
    "utf_16": ("json-utf-16", lambda content: content.decode().encode("utf-16"), "ff fe"),
}


@pytest.mark.parametrize(("kind", "change", "text"), JSON_CONTENTS.values(), ids=JSON_CONTENTS)
def test_json_that_is_gzip_an_lfs_pointer_or_utf_16_is_reported(data, kind, change, text):
    data.write()
    data.json_path.write_bytes(change(data.json_path.read_bytes()))
    assert_reported(kind, issues_of(data), text)


def test_named_pipe_in_place_of_the_json_is_refused_without_reading_it(data):
    os.mkfifo(data.json_path)
    assert_reported("file-unreadable", issues_of(data), "it is a pipe")


# id: (kind, list of the json, changes of its second entry, texts)
JSON_ENTRIES = {
    "unknown_image": ("unknown-image", "annotations", {"image_id": 4711}, "image_id 4711, which no image"),
    "unknown_category": ("unknown-category", "annotations", {"category_id": 77}, "category_id 77, which"),
    "box_outside": ("box-outside", "annotations", {"bbox": [30, 1, 60, 9]}, "annotation 104 (image 11) has"),
    "repeated_category": ("bad-category", "categories", {"id": 2}, "category id 2 is given twice: 'cat'"),
    "repeated_file": (
        "repeated-file",
        "images",
        {"file_name": "000.jpg", "width": 40, "height": 72},
        "file '000.jpg' is given 2 times: image 11 ('000.jpg'), image 18 ('000.jpg')",
    ),
}


@pytest.mark.parametrize(("kind", "key", "changes", "text"), JSON_ENTRIES.values(), ids=JSON_ENTRIES)
def test_coco_json_with_an_unknown_repeated_or_outside_entry_is_reported_with_that_entry(
    data, kind, key, changes, text
):
    data.document[key][1] |= changes
    data.write()
    assert_reported(kind, issues_of(data), text)


def test_missing_image_directory_is_named(data):
    data.write()
    data.images_dir.rename(data.directory / "pictures")
    assert_reported("no-image-directory", issues_of(data), str(data.images_dir))


def test_missing_shard_of_tfrecords_is_named(shards):
    first, _ = sorted(shards.glob("*.tfrecord"))
    first.unlink()
    source = open_source(file_pattern=f"{shards}/train-*.tfrecord")
    assert_reported("shard-missing", source.annotations.issues, str(first))


# --- training against evaluation, data against the run ---


@pytest.fixture
def evaluation(tmp_path) -> DataSet:
    return DataSet(tmp_path / "eval", 2)


def open_both(*data_sets: DataSet):
    for data_set in data_sets:
        data_set.write()
    return open_pair(*(DataFlags(str(each.images_dir), str(each.json_path)) for each in data_sets))


@pytest.mark.parametrize(
    ("category", "texts"),
    [
        ({"id": 5, "name": "hound"}, ["category 5", "hound", "dog"]),
        ({"id": 12, "name": "yak"}, ["category 12", "yak"]),
    ],
    ids=["renamed", "unknown"],
)
def test_evaluation_category_that_training_lacks_is_refused(data, evaluation, category, texts):
    categories = evaluation.document["categories"]
    categories[:] = [c for c in categories if c["id"] != category["id"]] + [category]
    with pytest.raises(DataError) as raised:
        open_both(data, evaluation)
    (issues,) = raised.value.issues
    assert issues.origin == str(evaluation.json_path)
    assert_reported("eval-categories", issues, *texts)


def test_evaluation_categories_in_another_order_are_a_warning(data, evaluation):
    evaluation.document["categories"] = CATEGORIES[::-1]
    train_source, eval_source = open_both(data, evaluation)
    assert train_source.label_map == eval_source.label_map
    issues = eval_source.annotations.issues
    assert_reported("category-order", issues, "category 5 ('dog') is listed after category 9 ('cow')")
    assert not train_source.annotations.issues["category-order"].count


@pytest.mark.parametrize(
    ("batch_size", "num_replicas", "text"),
    [(7, 1, "--batch_size=7"), (4, 2, "--batch_size=4 x 2 ranks"), (1, 7, "7 ranks")],
)
def test_fewer_images_than_a_batch_of_all_ranks_are_refused(data, batch_size, num_replicas, text):
    source = open_data(data)
    check_sizes(source, batch_size=6, num_replicas=1, max_instances=100)
    check_sizes(source, batch_size=1, num_replicas=6, max_instances=100)
    with pytest.raises(DataError) as raised:
        check_sizes(source, batch_size=batch_size, num_replicas=num_replicas, max_instances=100)
    assert_reported("fewer-than-batch", raised.value.issues[0], "6 images", text)


def test_image_with_more_boxes_than_max_instances_is_a_warning(data, capsys):
    annotation = data.annotation
    boxes = [annotation | {"id": 1000 + i, "bbox": [i, i, 5, 5]} for i in range(20)]
    data.document["annotations"] += boxes
    source = open_data(data)
    capsys.readouterr()
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=22)
    assert not capsys.readouterr().err
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=21)
    warning = capsys.readouterr().err
    assert f"image {annotation['image_id']} (" in warning and ") has 22, of which 21 are kept. " in warning


# --- no false alarms ---


def offenders_of(directory, json_name="instances.json"):
    source = open_source(str(directory / "images"), str(directory / json_name), policy=DECODE)
    return {issue.kind: issue.offenders for issue in source.annotations.issues}


def test_check_of_real_data_reports_only_crowds_images_without_boxes_and_boxes_outside_or_empty(
    coco128, bccd
):
    allowed = {"crowd", "image-without-boxes", "box-outside", "box-empty"}
    bccd_files = [f"instances_{split}.json" for split in ("train", "val", "test")]
    reports = [offenders_of(coco128), *(offenders_of(bccd, name) for name in bccd_files)]
    assert {kind for report in reports for kind in report} <= allowed
    empty_boxes = [text for report in reports for text in report.get("box-empty", [])]
    assert len(empty_boxes) == 2
    assert all("0.0] in " in text or ", 0.0, " in text for text in empty_boxes)


def test_check_of_synthetic_data_reports_only_crowds_and_images_without_boxes(tmp_path):
    draw_dataset(tmp_path, num_images=20, seed=0)
    assert offenders_of(tmp_path).keys() <= {"crowd", "image-without-boxes"}


def test_check_of_valid_coco_and_tfrecord_data_reports_no_issue(data, shards):
    records = open_source(file_pattern=f"{shards}/train-*.tfrecord", policy=DECODE)
    for source in (open_data(data, DECODE), records):
        assert source.size == 6 and not list(source.annotations.issues)
