"""Opens data as train.py does: data with one fault each, pairs that do not fit, and valid data.

Every kind of issue has a fault here. tests/common/data/check/ tests the details of each kind.
"""

import pytest

from common.data.check.images import ImagePolicy
from common.data.check.issues import KINDS, DataError, Issues, Severity
from common.data.open import DataFlags, check_sizes, open_pair, open_source
from tests.faults import image_faults, json_faults, record_faults
from tests.faults.data_set import DataSet
from tests.faults.record_faults import RecordSet
from tools.synthetic import draw_dataset

COCO_FAULTS = [*image_faults.FAULTS, *json_faults.FAULTS]
IMAGE_FAULTS = [fault for fault in COCO_FAULTS if KINDS[fault.kind].severity is Severity.IMAGE]
DECODE = ImagePolicy(decode=True)


def open_data(data: DataSet, policy: ImagePolicy = ImagePolicy()):
    data.write()
    return open_source(str(data.images_dir), str(data.json_path), policy=policy)


def report_of(flags: DataFlags, options: dict) -> Issues:
    """Returns the issues that are reported, even if they are errors."""
    try:
        return open_source(*flags, policy=ImagePolicy(**options)).annotations.issues
    except DataError as error:
        (issues,) = error.issues
        return issues


def assert_reported(kind: str, issues: Issues, texts: list[str]) -> None:
    """Asserts an issue of this kind with these texts, and no other error."""
    allowed = {kind, "image-empty" if kind == "no-images" else ""}
    assert not [i.kind for i in issues if i.kind not in allowed and i.severity is not Severity.WARNING]
    line = issues[kind].line()
    assert issues[kind].count and not [text for text in texts if text not in line], (texts, line)


@pytest.mark.parametrize("fault", COCO_FAULTS, ids=lambda fault: fault.name)
def test_fault_of_coco_data_is_reported_and_files_stay_unchanged(fault, tmp_path):
    data = DataSet(tmp_path / "data", fault.seed)
    texts = fault.apply(data)
    data.write()

    def snapshot():
        status = {str(path): path.lstat() for path in tmp_path.rglob("*")}
        return {path: (s.st_size, s.st_mtime_ns, s.st_mode) for path, s in status.items()}

    before = snapshot()
    issues = report_of(DataFlags(str(data.images_dir), str(data.json_path)), data.options)
    assert_reported(fault.kind, issues, texts)
    assert issues.origin == str(data.json_path)
    assert snapshot() == before


@pytest.mark.parametrize("fault", record_faults.FAULTS, ids=lambda fault: fault.name)
def test_fault_of_tfrecords_is_reported(fault, tmp_path):
    data = RecordSet(tmp_path / "data", fault.seed)
    texts = fault.apply(data)
    assert_reported(fault.kind, report_of(DataFlags(file_pattern=data.pattern), data.options), texts)


@pytest.mark.parametrize("fault", IMAGE_FAULTS, ids=lambda fault: fault.name)
def test_unreadable_image_is_left_out_with_on_bad_image_skip(fault, tmp_path):
    data = DataSet(tmp_path / "data", fault.seed)
    fault.apply(data)
    annotations = open_data(data, ImagePolicy("skip", **data.options)).annotations
    skipped = {image["id"] for image in data.document["images"]} - set(annotations.image_ids.tolist())
    assert data.image["id"] in skipped and annotations.issues[fault.kind].count == len(skipped)
    assert annotations.num_images == 6 - len(skipped)
    assert annotations.num_boxes == 2 * annotations.num_images
    assert annotations.issues[fault.kind].line().endswith(". Left out by --on_bad_image=skip")


def test_every_kind_of_issue_has_a_fault():
    elsewhere = {"eval-categories", "fewer-than-batch", "too-many-boxes"}  # tested below
    elsewhere |= {"label-file", "label-line", "label-turned", "label-missing"}  # tests/tools/conversion/
    elsewhere |= {"polygon", "difficult", "voc-zero"}
    elsewhere |= {"image-unreadable"}  # root can read every file
    faults = [*COCO_FAULTS, *record_faults.FAULTS]
    assert {fault.kind for fault in faults} | elsewhere == set(KINDS)


# --- training against evaluation, data against the run ---


@pytest.fixture
def train(tmp_path) -> DataSet:
    return DataSet(tmp_path / "train", 1)


@pytest.fixture
def evaluation(tmp_path) -> DataSet:
    return DataSet(tmp_path / "eval", 2)


def open_both(*data_sets: DataSet):
    for data in data_sets:
        data.write()
    return open_pair(*(DataFlags(str(data.images_dir), str(data.json_path)) for data in data_sets))


@pytest.mark.parametrize(
    ("category", "texts"),
    [
        ({"id": 5, "name": "hound"}, ["category 5", "hound", "dog"]),
        ({"id": 12, "name": "yak"}, ["category 12", "yak"]),
    ],
    ids=["renamed", "unknown"],
)
def test_evaluation_category_that_training_lacks_is_refused(train, evaluation, category, texts):
    categories = evaluation.document["categories"]
    categories[:] = [c for c in categories if c["id"] != category["id"]] + [category]
    with pytest.raises(DataError) as raised:
        open_both(train, evaluation)
    (issues,) = raised.value.issues
    assert issues.origin == str(evaluation.json_path)
    assert_reported("eval-categories", issues, texts)


def test_evaluation_categories_in_another_order_are_a_warning(train, evaluation):
    evaluation.document["categories"].reverse()
    train_source, eval_source = open_both(train, evaluation)
    assert train_source.label_map == eval_source.label_map
    texts = ["category 5 ('dog')", "9 ('cow')"]
    assert_reported("category-order", eval_source.annotations.issues, texts)
    assert not train_source.annotations.issues["category-order"].count


@pytest.mark.parametrize(
    ("batch_size", "num_replicas", "texts"),
    [
        (7, 1, ["6 images", "--batch_size=7"]),
        (4, 2, ["6 images", "--batch_size=4 x 2 ranks"]),
        (1, 7, ["6 images", "7 ranks"]),
    ],
)
def test_fewer_images_than_a_batch_of_all_ranks_are_refused(train, batch_size, num_replicas, texts):
    source = open_data(train)
    check_sizes(source, batch_size=6, num_replicas=1, max_instances=100)
    check_sizes(source, batch_size=1, num_replicas=6, max_instances=100)
    with pytest.raises(DataError) as raised:
        check_sizes(source, batch_size=batch_size, num_replicas=num_replicas, max_instances=100)
    assert_reported("fewer-than-batch", raised.value.issues[0], texts)


def test_image_with_more_boxes_than_max_instances_is_a_warning(train, capsys):
    annotation = train.annotation
    boxes = [annotation | {"id": 1000 + i, "bbox": [i, i, 5, 5]} for i in range(20)]
    train.document["annotations"] += boxes
    source = open_data(train)
    capsys.readouterr()
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=22)
    assert not capsys.readouterr().err
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=21)
    warning = capsys.readouterr().err
    assert f"image {annotation['image_id']} (" in warning and ") has 22, of which 21 are kept. " in warning


# --- no false alarms ---


def kinds_of(directory, json_name="instances.json"):
    source = open_source(str(directory / "images"), str(directory / json_name), policy=DECODE)
    return {issue.kind: issue.offenders for issue in source.annotations.issues}


def test_real_data_have_no_issues_but_outside_and_empty_boxes(coco128, bccd):
    allowed = {"crowd", "image-without-boxes", "box-outside", "box-empty"}
    reports = [kinds_of(coco128), *(kinds_of(bccd, f"instances_{s}.json") for s in ("train", "val", "test"))]
    assert {kind for report in reports for kind in report} <= allowed
    empty_boxes = [text for report in reports for text in report.get("box-empty", [])]
    assert len(empty_boxes) == 2
    assert all("0.0] in " in text or ", 0.0, " in text for text in empty_boxes)


def test_synthetic_data_have_no_issues_but_crowds_and_empty_images(tmp_path):
    draw_dataset(tmp_path, num_images=20, seed=0)
    assert kinds_of(tmp_path).keys() <= {"crowd", "image-without-boxes"}


def test_data_without_faults_have_no_issues(tmp_path):
    records = RecordSet(tmp_path / "records", 0)
    for source in (
        open_data(DataSet(tmp_path / "data", 0), DECODE),
        open_source(file_pattern=records.pattern, policy=DECODE),
    ):
        assert source.size == 6 and not list(source.annotations.issues)
