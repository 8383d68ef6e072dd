"""One record: which values are read, which are refused, and how a record is completed for DALI."""

import math

import pytest
import tensorflow as tf

from common.data.check.issues import Issues
from common.data.check.tfrecord import complete
from common.data.check.tfrecord_scan import LACKS_BOXES, LACKS_CROWDS, parse
from common.data.tfrecord import BOX_KEYS, CROWD_KEY, DALI_KEYS, LABEL_KEY
from tests.common.record_writing import PNG, empty_record, of_boxes, record

NAME = "x.tfrecord record 3"


def parse_record(content):
    """Returns the parsed record, the encoded image, and {kind: (count, offenders)}."""
    issues = Issues("")
    known = {3: ("car", "/m/car"), 17: ("Straße", "Straße"), 90: ("tooth brush", "tooth brush")}
    example, encoded = parse(content, NAME, known, issues)
    return example, encoded, {issue.kind: (issue.count, issue.offenders) for issue in issues}


def parse_valid(content):
    example, _, issues = parse_record(content)
    assert issues == {}
    return example


def test_record_with_all_keys_gives_image_name_id_size_and_objects():
    boxes = ([0.0, 0.125, 0.5, 0.25], [0.25, 0.0, 0.75, 1.5])
    values = {"object__class__label": [90, 3], "object__is_crowd": [0, 1], "object__area": [7.0, 0.0]}
    example, encoded, issues = parse_record(of_boxes(*boxes, filename=b"a/b.png", **values))
    assert issues == {} and encoded == PNG
    assert (example.name, example.image_id) == (f"{NAME} (image 42)", 42)
    assert (example.file_name, example.image_size) == ("a/b.png", (50, 100))
    assert example.objects == [
        (42, 90, (0, 0.125, 0.5, 0.25), -1, 0, 7),
        (42, 3, (0.25, 0, 0.75, 1.5), -1, 1, 0),
    ]
    assert example.lacks == 0


NO_VALUES = tf.train.Feature(int64_list=tf.train.Int64List())
NO_BOXES = {f"object__bbox__{side}": [] for side in ("xmin", "ymin", "xmax", "ymax")}
OPTIONAL_KEYS = {
    "no crowd key": (record(), LACKS_CROWDS, 1),
    "empty crowd key": (record(object__is_crowd=NO_VALUES), LACKS_CROWDS, 1),
    "crowd key": (record(object__is_crowd=[0]), 0, 1),
    "no label key": (record(**NO_BOXES, object__class__label=None), LACKS_BOXES, 0),
    "no object keys": (empty_record(42), LACKS_BOXES, 0),
}


@pytest.mark.parametrize(("content", "lacks", "num_objects"), OPTIONAL_KEYS.values(), ids=OPTIONAL_KEYS)
def test_record_without_optional_keys_is_valid_and_the_missing_keys_are_noted(content, lacks, num_objects):
    example = parse_valid(content)
    assert (example.lacks, example.file_name, len(example.objects)) == (lacks, "", num_objects)
    assert all(is_crowd == 0 and math.isnan(area) for *_, is_crowd, area in example.objects)


@pytest.mark.parametrize(
    ("content", "image_id"), [(b"9223372036854775807", 2**63 - 1), (b"0000000000000000042", 42), (b"0", 0)]
)
def test_image_id_of_up_to_19_digits_is_read(content, image_id):
    assert parse_valid(record(source_id=content)).image_id == image_id


SOURCE_IDS = {  # source_id -> file name
    "absent": (None, ""),
    "empty": (b"", ""),
    "name": (b"a/b.jpg", "a/b.jpg"),
    "negative": (b"-3", "-3"),
    "above int64": (b"9223372036854775808", "9223372036854775808"),
    "20 digits": (b"00000000000000000042", "00000000000000000042"),
    "negative integer": (-42, ""),
    "two ids": ([b"1", b"2"], "12"),
}


@pytest.mark.parametrize(("content", "file_name"), SOURCE_IDS.values(), ids=SOURCE_IDS)
def test_source_id_that_is_no_number_is_no_id_but_may_be_the_file_name(content, file_name):
    example = parse_valid(record(source_id=content))
    assert (example.name, example.image_id, example.file_name) == (NAME, -1, file_name)
    assert parse_valid(record(source_id=content, filename=b"c.jpg")).file_name == "c.jpg"


def test_source_id_that_is_an_integer_is_the_id_but_not_in_the_digits_that_dali_reads():
    example = parse_valid(record(source_id=43))
    assert (example.name, example.image_id, example.has_digits) == (f"{NAME} (image 43)", 43, False)
    assert parse_valid(record()).has_digits
    assert parse_valid(complete(record(source_id=43), example)).has_digits


@pytest.mark.parametrize("text", ["straße", "STRASSE", " Straße", "", "Strae"])
def test_class_text_that_is_the_name_of_its_label_is_accepted(text):
    parse_valid(record(object__class__text=text.encode()))


def test_class_text_may_be_the_alias_of_its_label():
    parse_valid(record(object__class__label=[3], object__class__text=b"/m/car"))


def test_class_texts_that_contradict_the_label_map_are_reported_once_per_label():
    boxes, labels, texts = (
        [[0.1, 0.1, 0.2, 0.2]] * 4,
        [3, 90, 3, 17],
        [b"tooth brush", b"car", b"tooth brush", b""],
    )
    _, _, issues = parse_record(of_boxes(*boxes, object__class__label=labels, object__class__text=texts))
    beginning, key = f"{NAME} (image 42) has for label", "image/object/class/text"
    assert issues == {
        "class-text": (
            2,
            [
                f"{beginning} 3 {key} 'tooth brush', but the name 'car' in the label map",
                f"{beginning} 90 {key} 'car', but the name 'tooth brush' in the label map",
            ],
        )
    }


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"\xe4.jpg", "\ufffd.jpg"), (b"a\0b", "a\ufffdb"), ([b"a", b"b"], "ab")],
    ids=["latin-1", "nul", "two values"],
)
def test_invalid_bytes_in_the_file_name_of_a_record_are_replaced(content, name):
    assert parse_valid(record(filename=content)).file_name == name


LABEL, YMAX = "object__class__label", "object__bbox__ymax"
CROWD, AREA = "object__is_crowd", "object__area"
BAD_FIELDS = [
    ("encoded", 3, "record-key-type", "has a int64_list in image/encoded, 3, instead of a bytes_list"),
    ("encoded", [b"a", b"b"], "record-value", "has image/encoded [b'a', b'b']: it must be one image"),
    ("height", None, "record-key-missing", "lacks image/height"),
    ("height", 0, "record-value", "has image/height 0: it must be one number of pixels"),
    ("width", 2**31, "record-value", "has image/width 2147483648: it must be"),
    ("width", [100, 100], "record-value", "has image/width [100, 100]: it must be one"),
    ("width", 1.5, "record-key-type", "has a float_list in image/width, 1.5, instead of a int64_list"),
    ("filename", 7, "record-key-type", "has a int64_list in image/filename, 7, "),
    (LABEL, [18], "unknown-category", "has the label 18, which none of 3 categories from 3 to 90 has"),
    (LABEL, [17, 3], "record-ragged", ": image/object/class/label 2, image/object/bbox/xmin 1, "),
    (LABEL, None, "record-key-missing", "label, but has 1 values in image/object/bbox/xmin"),
    (YMAX, None, "record-key-missing", "ymax, but has 1 values in image/object/class/label"),
    (YMAX, [], "record-ragged", "has lists of these lengths: image/object/class/label 1, "),
    (YMAX, [0.5, 0.6], "record-ragged", "image/object/bbox/ymax 2"),
    (YMAX, [1], "record-key-type", "has a int64_list in image/object/bbox/ymax, 1, "),
    ("object__class__text", [b"", b""], "record-ragged", "image/object/class/text 2"),
    ("object__class__text", 17, "record-key-type", "has a int64_list in image/object/class/text, 17, "),
    (CROWD, [0, 0], "record-ragged", "image/object/is_crowd 2"),
    (CROWD, [2], "record-value", "has image/object/is_crowd 2: it must be 0 or 1"),
    (CROWD, [0.0], "record-key-type", "has a float_list in image/object/is_crowd"),
    (AREA, [-1.0], "record-value", "has image/object/area -1.0: it must be a number, 0 or more"),
    (AREA, [math.nan], "record-value", "has image/object/area nan: "),
    (AREA, [math.inf], "record-value", "has image/object/area inf: "),
    (AREA, [5], "record-key-type", "has a int64_list in image/object/area, 5, "),
    (AREA, [5.0, 6.0], "record-ragged", "image/object/area 2"),
]


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    BAD_FIELDS,
    ids=[f"{key} is {value}" for key, value, *_ in BAD_FIELDS],
)
def test_bad_value_of_a_key_in_a_tfrecord_is_reported_with_record_key_and_value(key, value, kind, message):
    _, _, issues = parse_record(record(**{key: value}))
    ((_, (offender,)),) = issues.values()
    assert list(issues) == [kind] and message in offender
    assert offender.startswith(f"{NAME} (image 42) ")


def test_bad_tfrecord_values_of_a_million_bytes_are_shortened_in_the_reported_issues():
    changes = {"width": list(range(10**5)), "height": b"y" * 10**6, "object__class__text": b"x" * 10**6}
    _, _, issues = parse_record(record(**changes))
    assert [len(text) < 200 for _, offenders in issues.values() for text in offenders] == [True] * 3


def test_all_faults_of_one_tfrecord_record_are_reported_and_counted():
    changes = {"height": 0, "encoded": None, "object__class__label": [5, 18], "object__is_crowd": [0, 3]}
    _, _, issues = parse_record(of_boxes([0.1] * 4, [0.2] * 4, object__area=[-1.0, 2.0], **changes))
    counts = {"record-key-missing": 1, "record-value": 3, "unknown-category": 2}
    assert {kind: count for kind, (count, _) in issues.items()} == counts


def test_record_with_areas_but_no_boxes_is_reported_for_each_missing_box_and_label_key():
    _, _, issues = parse_record(empty_record(1, object__area=[1.0]))
    ((count, offenders),) = issues.values()
    assert list(issues) == ["record-key-missing"] and count == 5
    text = "lacks image/object/class/label, but has 1 values in image/object/area"
    assert offenders[0] == f"{NAME} (image 1) {text}"


@pytest.mark.parametrize(
    "content", [b"\xff\xff\xff", b"", b"\x12\x03abc"], ids=["no message", "empty", "other message"]
)
def test_bytes_that_are_no_tf_example_are_reported_with_their_length(content):
    example, encoded, issues = parse_record(content)
    ((_, (offender,)),) = issues.values()
    assert list(issues) == ["not-an-example"]
    assert offender.startswith(f"{NAME} ({len(content)} bytes)")
    assert example.image_id == -1 and encoded is None


INCOMPLETE = {
    "no objects": (empty_record(5), 0),
    "no crowd key": (record(), 1),
    "empty crowd key": (record(object__is_crowd=NO_VALUES), 1),
}


@pytest.mark.parametrize(("content", "num_objects"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_record_completed_for_dali_has_all_keys_that_dali_needs_and_its_old_values(content, num_objects):
    before = tf.train.Example.FromString(content).features.feature
    completed = complete(content, parse_valid(content))
    after = tf.train.Example.FromString(completed).features.feature
    assert set(after) == set(before) | set(DALI_KEYS)
    assert all(after[key] == before[key] for key in before if key != CROWD_KEY)
    assert len(after[LABEL_KEY].int64_list.value) == num_objects
    assert list(after[CROWD_KEY].int64_list.value) == [0] * num_objects
    assert all(after[key].WhichOneof("kind") == "float_list" for key in BOX_KEYS)
    assert parse_valid(completed).lacks == 0


def test_completed_record_with_a_name_as_id_has_its_number_and_keeps_its_crowds():
    content = record(source_id=b"cat.jpg", object__is_crowd=[1])
    example = parse_valid(content)
    example.image_id = 2**63 - 1
    completed = parse_valid(complete(content, example))
    assert (completed.image_id, completed.lacks, completed.objects[0][4]) == (2**63 - 1, 0, 1)
