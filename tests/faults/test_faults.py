"""Every fault of the corpus is reported before the first step: its kind, the file, the id of the offender."""

import pathlib

import pytest

from common.annotations import Annotations
from common.datacheck.datasets import DataFlags, check_sizes, open_pair, open_source
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import KINDS, DataError, Issue, Issues, Severity
from tests.faults import image_faults, json_faults, record_faults
from tests.faults.data_set import DataSet, Fault
from tests.faults.record_faults import RecordSet

FAULTS = [*image_faults.FAULTS, *json_faults.FAULTS]

TOGETHER = (
    "text_file",
    "annotation_of_an_image_id_as_a_string",
    "box_of_negative_width",
    "category_name_twice",
)
BY_NAME = {fault.name: fault for fault in FAULTS}
CONSEQUENCES = {"no-images": ["image-empty", "no-boxes"], "boxes-of-corners": ["box-outside"]}
PERMITTED = {"crowd", "image-without-boxes"}  # said of sound data, too


def opened(given: DataFlags, options: dict) -> list[Issues]:
    """What opening the data for training finds, whether or not it stops."""
    try:
        return [open_source(*given, policy=ImagePolicy(**options)).annotations.issues]
    except DataError as error:
        return list(error.issues)


def only_issue(found: list[Issues], kind: str) -> Issue:
    """The issue of `kind`; nothing else may have been found that stops or was mended."""
    (issues,) = found
    allowed = {kind, *CONSEQUENCES.get(kind, ())}
    assert not [f.kind for f in issues if f.kind not in allowed and f.severity is not Severity.WARNING]
    assert issues[kind].count, [f.line() for f in issues]
    return issues[kind]


def check_report(fault: Fault, issue: Issue, words: list[str], record_fault) -> None:
    assert issue.kind == fault.kind
    line = issue.line()
    missing = [word for word in words if word not in line]
    assert not missing, f"{missing} not in: {line}"
    record_fault(fault, line)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_of_coco_data(fault, tmp_path, record_fault):
    data = DataSet(tmp_path / "data", fault.seed)
    words = fault.spoil(data)
    data.write()
    given = DataFlags(str(data.images_dir), str(data.json_path))
    before = snapshot(tmp_path)
    found = opened(given, data.options)
    check_report(fault, only_issue(found, fault.kind), words, record_fault)
    assert found[0].origin == str(data.json_path)
    assert snapshot(tmp_path) == before, "the user's files were changed"


@pytest.mark.parametrize("fault", record_faults.FAULTS, ids=lambda fault: fault.name)
def test_faults_of_records(fault, tmp_path, record_fault, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = RecordSet(tmp_path / "data", fault.seed)
    words = fault.spoil(data)
    found = opened(DataFlags(file_pattern=data.pattern), data.options)
    check_report(fault, only_issue(found, fault.kind), words, record_fault)


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if KINDS[f.kind].severity is Severity.IMAGE], ids=lambda f: f.name
)
def test_unreadable_images_are_skipped_on_demand(fault, tmp_path):
    data = DataSet(tmp_path / "data", fault.seed)
    fault.spoil(data)
    data.write()
    policy = ImagePolicy("skip", **data.options)
    whole = {image["id"] for image in data.document["images"]}
    annotations = open_source(str(data.images_dir), str(data.json_path), policy=policy).annotations
    left_out = whole - set(annotations.image_ids.tolist())
    assert data.image["id"] in left_out and annotations.issues[fault.kind].count == len(left_out)
    assert annotations.num_images == len(whole) - len(left_out)
    assert annotations.num_boxes == 2 * annotations.num_images
    assert "left out" in annotations.issues[fault.kind].line().lower()


def test_faults_together_are_all_listed(tmp_path):
    data = DataSet(tmp_path / "data", 3)
    images, annotations = data.document["images"], data.document["annotations"]
    words = {}
    for i, name in enumerate(TOGETHER):  # each on a victim of its own
        data.image, data.annotation = images[i], annotations[2 * i]
        words[BY_NAME[name].kind] = BY_NAME[name].spoil(data)
    data.write()
    with pytest.raises(DataError) as raised:
        open_source(str(data.images_dir), str(data.json_path))
    message = str(raised.value)
    assert {f.kind for f in raised.value.issues[0].stopping} == set(words)
    assert all(word in message for of_kind in words.values() for word in of_kind)
    assert message.startswith(f"{len(TOGETHER)} kinds of faults") and len(message.splitlines()) == 1 + len(
        TOGETHER
    )


# --- training against evaluation, data against the run ---


@pytest.fixture
def two(tmp_path) -> tuple[DataSet, DataSet]:
    return DataSet(tmp_path / "train", 1), DataSet(tmp_path / "eval", 2)


def both(two: tuple[DataSet, DataSet]):
    for data in two:
        data.write()
    return open_pair(*(DataFlags(str(data.images_dir), str(data.json_path)) for data in two))


def cross(name: str, kind: str) -> Fault:
    return Fault(name, kind, lambda data: [])


def test_evaluation_under_other_names(two, record_fault):
    two[1].document["categories"][1]["name"] = "hound"
    with pytest.raises(DataError) as raised:
        both(two)
    issue = raised.value.issues[0]["eval-categories"]
    fault = cross("evaluation_under_other_names", "eval-categories")
    check_report(fault, issue, ["category 5", "hound", "dog"], record_fault)
    assert raised.value.issues[0].origin == str(two[1].json_path)


def test_evaluation_of_an_unknown_category(two, record_fault):
    two[1].document["categories"].append({"id": 12, "name": "yak"})
    with pytest.raises(DataError) as raised:
        both(two)
    fault = cross("evaluation_of_an_unknown_category", "eval-categories")
    check_report(fault, raised.value.issues[0]["eval-categories"], ["12", "yak"], record_fault)


def test_category_order_may_differ(two, record_fault):
    two[1].document["categories"].reverse()
    train, evaluation = both(two)
    assert train.label_map == evaluation.label_map
    fault = cross("evaluation_in_another_order", "category-order")
    check_report(fault, evaluation.annotations.issues["category-order"], ["9"], record_fault)
    assert not train.annotations.issues["category-order"].count


def test_faults_of_both_splits_are_listed_together(two):
    words = [BY_NAME["missing_file"].spoil(two[0]), BY_NAME["box_of_three_numbers"].spoil(two[1])]
    with pytest.raises(DataError) as raised:
        both(two)
    assert [issues.origin for issues in raised.value.issues] == [str(data.json_path) for data in two]
    assert all(word in str(raised.value) for of_one in words for word in of_one)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("fewer-than-batch", {"batch_size": 7}, ["6 images", "--batch_size=7"]),
        ("fewer-than-batch", {"batch_size": 4, "num_replicas": 2}, ["6 images", "--batch_size=4 x 2 ranks"]),
        ("fewer-than-ranks", {"num_replicas": 7}, ["6 images", "7 ranks"]),
    ],
)
def test_too_few_images(two, kind, options, words, record_fault):
    two[0].write()
    source = open_source(str(two[0].images_dir), str(two[0].json_path))
    check_sizes(source, batch_size=6, num_replicas=1, max_instances=100)
    with pytest.raises(DataError) as raised:
        check_sizes(source, **{"batch_size": 1, "num_replicas": 1, "max_instances": 100} | options)
    fault = cross("_".join([kind.replace("-", "_"), *map(str, options.values())]), kind)
    check_report(fault, raised.value.issues[0][kind], words, record_fault)


def test_more_boxes_than_the_maximum(two, capsys, record_fault):
    data = two[0]
    data.document["annotations"] += [
        data.annotation | {"id": 1000 + i, "bbox": [i % 20, i % 30, 5, 5]} for i in range(500)
    ]
    data.write()
    source = open_source(str(data.images_dir), str(data.json_path))
    check_sizes(source, batch_size=1, num_replicas=1, max_instances=100)
    said = capsys.readouterr().err
    image = f"image {data.annotation['image_id']}"
    assert "max_instances" in said and image in said and "502" in said and "100" in said
    record_fault(cross("more_boxes_than_the_maximum", "too-many-boxes"), said.partition(": ")[2])


# --- no false alarms ---


@pytest.mark.parametrize("decode", [False, True])
def test_no_false_alarm_on_real_data(coco128, bccd, decode):
    policy = ImagePolicy(decode=decode)
    found = Issues("")
    for directory, names in (
        (coco128, ["instances"]),
        (bccd, [f"instances_{s}" for s in ("train", "val", "test")]),
    ):
        for name in names:
            found.extend(annotations_of(directory / f"{name}.json", policy).issues)
    mended = {issue.kind: issue.count for issue in found if issue.severity is not Severity.WARNING}
    assert mended.pop("box-empty") == 2  # BCCD's two
    assert set(mended) <= {"box-outside"}
    assert {f.kind for f in found if f.severity is Severity.WARNING} <= PERMITTED


def test_no_false_alarm_on_drawn_data(tmp_path):
    from tools.synthetic import draw_dataset

    draw_dataset(tmp_path, num_images=20, seed=0)
    issues = annotations_of(tmp_path / "instances.json", ImagePolicy(decode=True)).issues
    assert {issue.kind for issue in issues} <= PERMITTED


def test_no_false_alarm_on_the_sound_set(tmp_path):
    data = DataSet(tmp_path / "data", 0)
    data.write()
    assert not list(annotations_of(data.json_path, ImagePolicy(decode=True)).issues)
    records = RecordSet(tmp_path / "more", 0)
    assert not list(
        open_source(file_pattern=records.pattern, policy=ImagePolicy(decode=True)).annotations.issues
    )


def annotations_of(json_path: pathlib.Path, policy: ImagePolicy) -> Annotations:
    return open_source(str(json_path.parent / "images"), str(json_path), policy=policy).annotations


def snapshot(directory: pathlib.Path) -> dict[str, tuple]:
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns, path.lstat().st_mode)
        for path in sorted(directory.rglob("*"))
    }


def test_the_corpus_is_large_and_complete():
    faults = [*FAULTS, *record_faults.FAULTS]
    assert len({fault.name for fault in faults}) == len(faults) >= 60
    below = {"eval-categories", "fewer-than-batch", "fewer-than-ranks", "too-many-boxes"}
    permissions = {"image-unreadable"}  # tests may run as root, whom nothing is forbidden
    converters = {  # tests of convert.py, voc.py and yolo.py
        *("label-file", "label-line", "label-turned", "label-missing", "polygon"),
        *("difficult", "voc-zero"),
    }
    assert {fault.kind for fault in faults} | below | permissions | converters == set(KINDS)
