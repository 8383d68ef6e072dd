import pathlib

import pytest

from common.data.annotations import Annotations
from common.data.check.images import ImagePolicy
from common.data.check.issues import KINDS, DataError, Issues, Severity
from common.data.open import DataFlags, check_sizes, open_pair, open_source
from tests.faults import image_faults, json_faults, record_faults
from tests.faults.data_set import DataSet
from tests.faults.record_faults import RecordSet
from tools.synthetic import draw_dataset

FAULTS = [*image_faults.FAULTS, *json_faults.FAULTS]
UNREADABLE = [fault for fault in FAULTS if KINDS[fault.kind].severity is Severity.IMAGE]
PERMITTED = {"crowd", "image-without-boxes"}


def open_data(data: DataSet, policy: ImagePolicy = ImagePolicy()):
    data.write()
    return open_source(str(data.images_dir), str(data.json_path), policy=policy)


def check_report(kind: str, issues: Issues, words: list[str]) -> None:
    """The issue of this kind has the words, and there is no other error."""
    allowed = {kind, "image-empty" if kind == "no-images" else ""}
    assert not [i.kind for i in issues if i.kind not in allowed and i.severity is not Severity.WARNING]
    line = issues[kind].line()
    assert issues[kind].count and not [word for word in words if word not in line], (words, line)


def what_is_found(given: DataFlags, options: dict) -> Issues:
    """Returns the issues that train.py finds, even if they are errors."""
    try:
        return open_source(*given, policy=ImagePolicy(**options)).annotations.issues
    except DataError as error:
        (issues,) = error.issues
        return issues


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_of_coco_data(fault, tmp_path):
    data = DataSet(tmp_path / "data", fault.seed)
    words = fault.words(data)
    data.write()
    before = snapshot(tmp_path)
    issues = what_is_found(DataFlags(str(data.images_dir), str(data.json_path)), data.options)
    check_report(fault.kind, issues, words)
    assert issues.origin == str(data.json_path)
    assert snapshot(tmp_path) == before, "the user's files were changed"


@pytest.mark.parametrize("fault", record_faults.FAULTS, ids=lambda fault: fault.name)
def test_faults_of_records(fault, tmp_path):
    data = RecordSet(tmp_path / "data", fault.seed)
    words = fault.words(data)
    check_report(fault.kind, what_is_found(DataFlags(file_pattern=data.pattern), data.options), words)


@pytest.mark.parametrize("fault", UNREADABLE, ids=lambda fault: fault.name)
def test_unreadable_images_are_skipped_on_demand(fault, tmp_path):
    data = DataSet(tmp_path / "data", fault.seed)
    fault.spoil(data)
    annotations = open_data(data, ImagePolicy("skip", **data.options)).annotations
    left_out = {image["id"] for image in data.document["images"]} - set(annotations.image_ids.tolist())
    assert data.image["id"] in left_out and annotations.issues[fault.kind].count == len(left_out)
    assert annotations.num_images == 6 - len(left_out)
    assert annotations.num_boxes == 2 * annotations.num_images
    assert annotations.issues[fault.kind].line().endswith(". Left out by --on_bad_image=skip")


# --- training against evaluation, data against the run ---


@pytest.fixture
def two(tmp_path) -> tuple[DataSet, DataSet]:
    return DataSet(tmp_path / "train", 1), DataSet(tmp_path / "eval", 2)


def open_both(two: tuple[DataSet, DataSet]):
    for data in two:
        data.write()
    return open_pair(*(DataFlags(str(data.images_dir), str(data.json_path)) for data in two))


OTHER_CATEGORIES = [
    ({"id": 5, "name": "hound"}, ["category 5", "hound", "dog"]),
    ({"id": 12, "name": "yak"}, ["category 12", "yak"]),
]


@pytest.mark.parametrize(("category", "words"), OTHER_CATEGORIES)
def test_evaluation_of_other_categories_is_refused(two, category, words):
    categories = two[1].document["categories"]
    categories[:] = [c for c in categories if c["id"] != category["id"]] + [category]
    with pytest.raises(DataError) as raised:
        open_both(two)
    (issues,) = raised.value.issues
    assert issues.origin == str(two[1].json_path)
    check_report("eval-categories", issues, words)


def test_category_order_may_differ(two):
    two[1].document["categories"].reverse()
    train, evaluation = open_both(two)
    assert train.label_map == evaluation.label_map
    check_report("category-order", evaluation.annotations.issues, ["category 5 ('dog')", "9 ('cow')"])
    assert not train.annotations.issues["category-order"].count


TOO_FEW = [
    ("fewer-than-batch", 7, 1, ["6 images", "--batch_size=7"]),
    ("fewer-than-batch", 4, 2, ["6 images", "--batch_size=4 x 2 ranks"]),
    ("fewer-than-batch", 1, 7, ["6 images", "7 ranks"]),
]


@pytest.mark.parametrize(("kind", "batch_size", "num_replicas", "words"), TOO_FEW)
def test_too_few_images(two, kind, batch_size, num_replicas, words):
    source = open_data(two[0])
    check_sizes(source, batch_size=6, num_replicas=1, max_instances=100)
    check_sizes(source, batch_size=1, num_replicas=6, max_instances=100)
    with pytest.raises(DataError) as raised:
        check_sizes(source, batch_size=batch_size, num_replicas=num_replicas, max_instances=100)
    check_report(kind, raised.value.issues[0], words)


def test_more_boxes_than_the_maximum(two, capsys):
    annotations = two[0].document["annotations"]
    annotations += [two[0].annotation | {"id": 1000 + i, "bbox": [i, i, 5, 5]} for i in range(20)]
    source = open_data(two[0])
    capsys.readouterr()
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=22)
    assert not capsys.readouterr().err
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=21)
    said = capsys.readouterr().err
    assert f"image {two[0].annotation['image_id']} (" in said and ") has 22, of which 21 are kept. " in said


# --- no false alarms ---


def annotations_of(json_path: pathlib.Path) -> Annotations:
    policy = ImagePolicy(decode=True)
    return open_source(str(json_path.parent / "images"), str(json_path), policy=policy).annotations


def test_no_false_alarm_on_real_data(coco128, bccd):
    paths = [coco128 / "instances.json", *(bccd / f"instances_{s}.json" for s in ("train", "val", "test"))]
    found = Issues("")
    for path in paths:
        found.extend(annotations_of(path).issues)
    assert {issue.kind for issue in found} <= PERMITTED | {"box-outside", "box-empty"}
    assert found["box-empty"].count == 2
    assert all("0.0] in " in text or ", 0.0, " in text for text in found["box-empty"].offenders)


def test_no_false_alarm_on_drawn_data(tmp_path):
    draw_dataset(tmp_path, num_images=20, seed=0)
    assert {issue.kind for issue in annotations_of(tmp_path / "instances.json").issues} <= PERMITTED


def test_no_false_alarm_on_the_sound_sets(tmp_path):
    data, records = DataSet(tmp_path / "data", 0), RecordSet(tmp_path / "records", 0)
    policy = ImagePolicy(decode=True)
    for source in (open_data(data, policy), open_source(file_pattern=records.pattern, policy=policy)):
        assert source.size == 6 and not list(source.annotations.issues)


def snapshot(directory: pathlib.Path) -> dict[str, tuple]:
    status = {str(path): path.lstat() for path in directory.rglob("*")}
    return {path: (of.st_size, of.st_mtime_ns, of.st_mode) for path, of in status.items()}


def test_the_corpus_is_large_and_complete():
    faults = [*FAULTS, *record_faults.FAULTS]
    assert len({fault.name for fault in faults}) == len(faults) >= 60
    below = {"eval-categories", "fewer-than-batch", "too-many-boxes"}
    permissions = {"image-unreadable"}  # not testable, because root can read every file
    of_converters = {"label-file", "label-line", "label-turned", "label-missing"}
    of_converters |= {"polygon", "difficult", "voc-zero"}
    assert {fault.kind for fault in faults} | below | permissions | of_converters == set(KINDS)
