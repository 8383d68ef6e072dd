"""The cache of checked annotations: a later open has the same result, and notices every change."""

import dataclasses
import os
from unittest import mock

import numpy as np
import PIL.Image
import pytest

from common.args import ImagePolicy
from common.data import coco
from common.data.annotations import ARRAYS
from common.data.check import coco_cache, coco_parse
from common.data.check.issues import DataError
from common.data.coco import load_coco
from common.files import cache_directory
from tests.common.coco_documents import SMALL, changed, draw_images, write_json

SKIP = ImagePolicy(on_bad_image="skip")
MORE = [
    {"id": 50, "file_name": "caf\u00e9 1.jpg", "width": 20, "height": 10},
    {"id": 2**40, "file_name": "missing.jpg", "width": 20, "height": 10},
]
# Boxes outside, without area and repeated, a crowd, large ids, an image without boxes, equal images.
DOCUMENT = SMALL | {
    "images": [SMALL["images"][0], MORE[1], SMALL["images"][1], MORE[0]],
    "annotations": [
        *SMALL["annotations"],
        *({"image_id": 7, "category_id": 9, "bbox": box} for box in ([20, 30, 20, 5], [9, 9, 0, 4])),
        *({"image_id": image_id, "category_id": 2, "bbox": [1, 1, 3, 3]} for image_id in (7, 7, 2**40)),
    ],
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A directory with the images of DOCUMENT, except missing.jpg, and its json."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(coco_cache, "LARGE", 0)
    directory = tmp_path / "data"
    directory.mkdir()
    draw_images(directory)
    (directory / MORE[0]["file_name"]).write_bytes((directory / "a.jpg").read_bytes())
    write_json(directory, DOCUMENT)
    return directory


@pytest.fixture
def parsed(monkeypatch):
    """A mock that counts the jsons that are parsed."""
    parse = mock.Mock(side_effect=coco_parse.parse)
    monkeypatch.setattr(coco.coco_parse, "parse", parse)
    return parse


def load(directory, policy=SKIP):
    return load_coco(directory / "instances.json", directory, policy=policy)


def assert_same(annotations, expected):
    for field in dataclasses.fields(annotations):
        value, other = getattr(annotations, field.name), getattr(expected, field.name)
        if isinstance(other, np.ndarray):
            assert (value.dtype, value.shape, value.tobytes()) == (other.dtype, other.shape, other.tobytes())
        elif field.name == "issues":
            assert list(value) == list(other) and value.origin == other.origin
            assert value.policy == other.policy
        else:
            assert value == other, field.name
    assert annotations.fingerprint() == expected.fingerprint()
    for field in dataclasses.fields(annotations.target_boxes):
        value, other = (getattr(a.target_boxes, field.name) for a in (annotations, expected))
        np.testing.assert_array_equal(value, other)
        assert np.asarray(value).dtype == np.asarray(other).dtype


def test_cached_json_has_the_annotations_and_issues_of_an_uncached_one_without_parsing(
    data, parsed, monkeypatch
):
    with monkeypatch.context() as uncached:
        uncached.setattr(coco_cache, "LARGE", 2**40)
        expected = load(data)
    kinds = {issue.kind for issue in expected.issues}
    assert kinds >= {"box-outside", "box-empty", "box-repeated", "crowd", "image-missing", "repeated-image"}
    assert expected.file_names == ["a.jpg", "sub/b.jpg", "caf\u00e9 1.jpg"]
    first, second = load(data), load(data)
    assert parsed.call_count == 2
    assert_same(first, expected)
    assert_same(second, expected)
    assert all(not getattr(second, name).flags.writeable for name in ARRAYS)
    half = second.select(np.array([True, False, True]))
    assert_same(half, expected.select(np.array([True, False, True])))


def test_json_with_all_its_images_is_cached_for_each_policy_and_directory(data, parsed, tmp_path):
    (data / "missing.jpg").write_bytes((data / "a.jpg").read_bytes())
    stop = load(data, ImagePolicy())
    assert_same(load(data, ImagePolicy()), stop)
    assert parsed.call_count == 1 and stop.num_images == 4
    load(data, SKIP)
    load(data, ImagePolicy(coco_pixels="stored"))
    load(data, ImagePolicy(check="none"))
    assert parsed.call_count == 4
    (tmp_path / "link").symlink_to(data)
    linked = load_coco(tmp_path / "link" / "instances.json", tmp_path / "link")
    assert parsed.call_count == 4 and linked.origin == str(tmp_path / "link" / "instances.json")
    load_coco(data / "instances.json")
    assert parsed.call_count == 5


def test_json_whose_images_are_not_checked_is_cached_whatever_they_are(data, parsed):
    first = load(data, ImagePolicy(check="none"))
    assert first.num_images == 4 and first.issues["image-unchecked"].count == 4
    (data / "a.jpg").unlink()
    assert_same(load(data, ImagePolicy(check="none")), first)
    assert parsed.call_count == 1


def test_change_of_a_json_that_keeps_its_size_and_times_is_noticed(data, parsed):
    load(data)
    path = data / "instances.json"
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b'"nine"', b'"NINE"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load(data).label_map.names == ("two", "NINE")
    path.write_bytes(content)
    assert load(data).label_map.names == ("two", "nine") and parsed.call_count == 2


def test_damaged_cache_files_are_not_used_but_written_again(data, parsed):
    first = load(data)
    paths = [path for path in cache_directory().iterdir() if path.name.startswith(("coco-", "files-"))]
    assert len(paths) == 2
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        assert_same(load(data), first)
        assert path.read_bytes() != content
    assert_same(load(data), first)
    assert parsed.call_count == 2  # only a damaged coco-* file has the json parsed


def swap(path, size=(20, 10), **options):
    PIL.Image.new("RGB", size, (9, 200, 7)).save(path, **options)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda data: swap(data / "a.jpg", (21, 10)), "image-size-differs"),
        (lambda data: (data / "a.jpg").write_bytes((data / "a.jpg").read_bytes()[:-9]), "image-truncated"),
        (lambda data: (data / "a.jpg").unlink(), "image-missing"),
        (lambda data: swap(data / "missing.jpg"), "image-missing"),
        (lambda data: swap(data / "MISSING.JPG", format="JPEG"), "image-missing"),
        (lambda data: swap(data / "a.jpg"), "repeated-image"),
    ],
    ids=["size", "truncated", "removed", "added", "similar-name", "no-longer-equal"],
)
def test_change_of_an_image_file_is_noticed(data, parsed, change, kind):
    before = load(data).issues[kind]
    change(data)
    try:
        after = load(data).issues[kind]
    except DataError as error:
        after = error.issues[0][kind]
    assert (after.count, after.offenders) != (before.count, before.offenders)
    assert parsed.call_count == 2


def test_change_in_the_middle_of_equal_images_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(coco_cache, "LARGE", 0)
    pixels = np.zeros((100, 100, 3), np.uint8)
    for name in ("a.bmp", "b.bmp"):
        PIL.Image.fromarray(pixels).save(tmp_path / name)
    images = [
        {"id": i, "file_name": f"{name}.bmp", "width": 100, "height": 100} for i, name in enumerate("ab")
    ]
    boxes = [{"image_id": 0, "category_id": 2, "bbox": [1, 1, 3, 3]}]
    write_json(tmp_path, SMALL | {"images": images, "annotations": boxes})
    assert [load(tmp_path).issues["repeated-image"].count for _ in range(2)] == [1, 1]
    pixels[50, 50] = 9
    PIL.Image.fromarray(pixels).save(tmp_path / "b.bmp")
    assert load(tmp_path).issues["repeated-image"].count == 0


def test_refused_json_is_checked_again(data, parsed):
    messages = set()
    for _ in range(2):
        with pytest.raises(DataError, match=r"missing\.jpg") as error:
            load(data, ImagePolicy())
        messages.add(str(error.value))
    assert len(messages) == 1 and parsed.call_count == 2


def test_json_that_changes_during_its_check_is_not_cached(data, monkeypatch):
    first = write_json(data, changed(["categories", 0, "name"], "TWO", DOCUMENT)).read_bytes()

    def parse(path, issues):
        write_json(data, DOCUMENT)
        return coco_parse_parse(path, issues)

    coco_parse_parse = coco_parse.parse
    with monkeypatch.context() as once:
        once.setattr(coco.coco_parse, "parse", parse)
        assert load(data).label_map.names == ("two", "nine")
    write_json(data, first)
    assert load(data).label_map.names == ("TWO", "nine")


def cached(directory):
    return [path for path in cache_directory().iterdir() if path.name.startswith("coco-")]


def test_small_json_is_not_cached(data, monkeypatch):
    monkeypatch.setattr(coco_cache, "LARGE", (data / "instances.json").stat().st_size + 1)
    load(data)
    assert not cached(data)
    monkeypatch.setattr(coco_cache, "LARGE", (data / "instances.json").stat().st_size)
    load(data)
    assert len(cached(data)) == 1


def test_annotations_that_another_version_of_the_check_or_a_full_disk_left_are_not_used(
    data, parsed, monkeypatch
):
    first = load(data)
    monkeypatch.setattr(coco_cache, "_code", lambda: "another")
    assert_same(load(data), first)
    assert parsed.call_count == 2 and len(cached(data)) == 2
    for path in cached(data):
        path.write_bytes(path.read_bytes()[:-1])
    assert_same(load(data), first)
    assert parsed.call_count == 3
