"""YOLO's labels: drawn boxes found again, polygons, EXIF turns, where files lie, and what is refused."""

import json
import os
import pathlib
import shutil
import tempfile

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from common.args import ImagePolicy
from common.datacheck.coco import load_coco
from common.datacheck.issues import DataError
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion import yolo
from tools.conversion.options import Options
from tools.conversion.yolo import parse_line, turn_back

SKIP = ImagePolicy(on_bad_image="skip")


@pytest.fixture
def made(tmp_path):
    """images/ and labels/ of a (20 x 40 pixels, a cat) and b (a dog), and classes.txt."""
    for stem, label in (("a", "0 0.5 0.5 0.25 0.5"), ("b", "1 0.25 0.5 0.5 1")):
        put(tmp_path, f"images/{stem}.png", picture())
        put(tmp_path, f"labels/{stem}.txt", label + "\n")
    put(tmp_path, "classes.txt", "cat\ndog\n")
    return tmp_path


def put(directory, name, content):
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, PIL.Image.Image):
        content.save(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def picture():
    return PIL.Image.new("RGB", (40, 20))


def read_yolo(path, *, label_map=None, names=None, pixels=None, policy=ImagePolicy(), **options):
    """Of the reader, with a label map that need not be a file."""
    names = names and str(names)
    with tempfile.TemporaryDirectory() as folder:
        if label_map:
            label_map.save(f"{folder}/labels.json")
            options["label_map"] = f"{folder}/labels.json"
        return yolo.read_yolo(Options(input=str(path), names=names, yolo_pixels=pixels, **options), policy)


def refusal(path, error=DataError, **options):
    with pytest.raises(error) as refused:
        read_yolo(path, **options)
    return str(refused.value)


@pytest.mark.parametrize(("decimals", "tolerance"), [(9, 1e-6), (6, 1.2e-6 * 150)])
def test_drawn_boxes_are_found_again(drawn, tmp_path, decimals, tolerance):
    """`tolerance` in pixels: what is lost by `decimals` of an image at most 151 pixels wide."""
    document = json.loads((drawn / "instances.json").read_text())
    shutil.copytree(drawn / "images", tmp_path / "images")
    put(tmp_path, "obj.names", "car\ncat\ntoothbrush\n")
    classes = {3: 0, 17: 1, 90: 2}
    for image in document["images"]:
        lines = []
        for o in (o for o in document["annotations"] if o["image_id"] == image["id"]):
            x, y, w, h = o["bbox"]
            scale = np.array([image["width"], image["height"]] * 2)
            numbers = np.array([x + w / 2, y + h / 2, w, h]) / scale
            lines.append(f"{classes[o['category_id']]} " + " ".join(f"{n:.{decimals}f}" for n in numbers))
        put(tmp_path, f"labels/{pathlib.Path(image['file_name']).stem}.txt", "\n".join(lines))
    found, images_dir = read_yolo(tmp_path)

    expected = load_coco(drawn / "instances.json")
    assert images_dir == os.fspath(tmp_path / "images")
    assert found.file_names == expected.file_names
    np.testing.assert_array_equal(found.image_sizes, expected.image_sizes)
    np.testing.assert_array_equal(found.box_image, expected.box_image)
    np.testing.assert_allclose(found.boxes_ltwh_px, expected.boxes_ltwh_px, rtol=0, atol=tolerance)
    names = dict(zip(expected.label_map.category_ids, expected.label_map.names, strict=True))
    assert found.label_map == LabelMap((1, 2, 3), ("car", "cat", "toothbrush"))
    own = [found.label_map.names[i - 1] for i in found.category_ids]
    assert own == [names[i] for i in expected.category_ids.tolist()]
    np.testing.assert_array_equal(found.areas, np.prod(found.boxes_ltwh_px[:, 2:], axis=1))


def test_a_label(made):
    found, _ = read_yolo(made)
    assert found.boxes_ltwh_px.tolist() == [[15, 5, 10, 10], [0, 0, 20, 20]]
    assert found.category_ids.tolist() == [1, 2]
    assert found.image_sizes.tolist() == [[20, 40]] * 2
    assert not found.is_crowd.any()
    shutil.move(made / "classes.txt", made / "labels" / "classes.txt")  # where labelImg writes it
    put(made, "labels/a.txt", "0 0.333333 0.5 0.25 0.5")
    assert read_yolo(made)[0].boxes_ltwh_px[0].tolist() == [8.33332, 5, 10, 10]


def test_a_label_map_gives_ids_by_name(made):
    found, _ = read_yolo(made, label_map=LabelMap((7, 8, 9), ("bird", "dog", "cat")))
    assert found.category_ids.tolist() == [9, 8]
    message = refusal(made, label_map=LabelMap((7,), ("dog",)))
    assert "a.txt line 1 '0 0.5 0.5 0.25 0.5' has class 0 of 1" in message


def test_polygons_give_their_bounding_box(made):
    put(made, "labels/a.txt", "\ufeff0 0.25 0.5 0.75 0.25 0.5 1\r\n\r\n1 0.1 0.2 0.6 0.2 0.6 0.8 0.1 0.8\r\n")
    found, _ = read_yolo(made)
    np.testing.assert_allclose(found.boxes_ltwh_px[:2], [[10, 5, 20, 15], [4, 4, 20, 12]], atol=1e-9)
    assert found.issues["polygon"].count == 2
    assert "a.txt line 3 " in found.issues["polygon"].offenders[1]


def test_images_without_labels_stay_unless_all_are(made):
    put(made, "labels/a.txt", " \n")
    put(made, "images/c.png", picture())
    found, _ = read_yolo(made)
    assert found.file_names == ["a.png", "b.png", "c.png"] and found.box_image.tolist() == [1]
    (offender,) = found.issues["label-missing"].offenders
    assert offender.startswith("image 'c.png' (") and offender.endswith("labels/c.txt)")
    shutil.rmtree(made / "labels")
    assert "no usable box: 3 images, none with an object" in refusal(made)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_turned_back_as_pillow_turns_pixels(orientation):
    stored = np.zeros((20, 40), np.uint8)
    stored[3:8, 10:28] = 255
    image = PIL.Image.fromarray(stored)
    image.getexif()[0x0112] = orientation
    turned = np.asarray(PIL.ImageOps.exif_transpose(image))
    rows, columns = np.nonzero(turned)
    height, width = turned.shape
    left, top = columns.min() / width, rows.min() / height
    box = [left, top, (columns.max() + 1) / width - left, (rows.max() + 1) / height - top]
    found = turn_back(np.array([box]), orientation) * [40, 20, 40, 20]
    np.testing.assert_allclose(found, [[10, 3, 18, 5]], atol=1e-12)


def test_exif_turns_must_be_decided(made):
    stored = PIL.Image.new("RGB", (40, 20))
    stored.getexif()[0x0112] = 6
    stored.save(made / "images" / "c.jpg", exif=stored.getexif())
    put(made, "labels/c.txt", "1 0.25 0.375 0.5 0.25\n")  # of the turned image, 20 x 40: 0, 10, 10, 10
    message = refusal(made)
    assert "image 'c.jpg' (" in message and "has orientation 6" in message and "--yolo_pixels" in message
    found, _ = read_yolo(made, pixels="stored")
    assert found.boxes_ltwh_px[2].tolist() == [0, 5, 20, 5]
    found, _ = read_yolo(made, pixels="turned")
    assert found.boxes_ltwh_px[2].tolist() == [10, 10, 10, 10]
    assert found.image_sizes[2].tolist() == [20, 40]
    put(made, "labels/c.txt", "")  # nothing to decide
    assert read_yolo(made)[0].num_images == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0.5 0.5 0.25", "a.txt line 1 '0 0.5 0.5 0.25' has 4 numbers"),
        ("0 0.5 0.5 0.2 0.2\n\n0 1 2", "a.txt line 3 '0 1 2' has 3 numbers"),
        ("0 0.5 0.5 0.2 0.2 0.9", "'0 0.5 0.5 0.2 0.2 0.9' has 6 numbers: a box is class cx cy w h"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.3 0.4", "has 8 numbers"),
        ("cat 0.5 0.5 0.2 0.2", "a.txt line 1 'cat 0.5 0.5 0.2 0.2' holds something that is not a number"),
        ("0,0.5,0.5,0.2,0.2", "a.txt line 1 '0,0.5,0.5,0.2,0.2' has 1 numbers"),
        ("0 nan 0.5 0.2 0.2", "line 1 '0 nan 0.5 0.2 0.2' is not normalised"),
        ("0 0.5 0.5 inf 0.2", "is not normalised"),
        ("-1 0.5 0.5 0.2 0.2", "has class -1 of 2"),
        ("0.5 0.5 0.5 0.2 0.2", "has class 0.5 of 2"),
        ("0 0.5 0.5 -0.2 0.2", "line 1 '0 0.5 0.5 -0.2 0.2' has a negative side"),
        ("0 320 240 20 20", "line 1 '0 320 240 20 20' is not normalised"),
        ("0 10 10 20 10 20 20", "is not normalised"),
        ("2 0.5 0.5 0.2 0.2", "line 1 '2 0.5 0.5 0.2 0.2' has class 2 of 2"),
        (b"\xff\xfe\x00", "a.txt is not UTF-8 text"),
    ],
)
def test_what_is_refused(made, text, message):
    put(made, "labels/a.txt", text)
    assert message in refusal(made)


def test_everything_is_listed_at_once(made):
    put(made, "labels/a.txt", "0 1 2\n0 0.5 0.5 -1 1\n5 0.5 0.5 0.2 0.2\n")
    put(made, "images/b.png", b"")
    message = refusal(made)
    for expected in ("line 1 '0 1 2'", "line 2 ", "has class 5 of 2", "'b.png'"):
        assert expected in message, message


def test_images_that_cannot_be_read_are_left_out_on_demand(made):
    put(made, "images/a.png", b"no image")
    assert "'a.png'" in refusal(made)
    found, _ = read_yolo(made, policy=SKIP)
    assert found.file_names == ["b.png"] and found.boxes_ltwh_px.tolist() == [[0, 0, 20, 20]]


def test_one_label_file_for_two_images(made):
    put(made, "images/a.jpg", picture())
    assert "a.txt is of both 'a.jpg' and 'a.png'" in refusal(made)


def test_names_that_json_cannot_hold_or_dali_would_split(made):
    shutil.copy(made / "images" / "a.png", made / "images" / os.fsdecode(b"\xff.png"))
    assert "'\\udcff.png' (" in refusal(made) and "its name is not UTF-8" in refusal(made)
    found, _ = read_yolo(made, policy=SKIP)
    assert found.file_names == ["a.png", "b.png"]
    shutil.copy(made / "images" / "a.png", made / "images" / "c\nd.png")
    assert "'c\\nd.png' (" in refusal(made, policy=SKIP)


@pytest.mark.parametrize("layout", ["images/{split}", "{split}/images"])
def test_splits_of_a_directory(made, layout):
    for split in ("train", "val"):
        folder = layout.format(split=split)
        put(made, f"{folder}/x/{split}1.png", picture())
        put(made, f"{folder.replace('images', 'labels')}/x/{split}1.txt", "1 0.5 0.5 1 1")
    found, images_dir = read_yolo(made, split="val")
    assert found.file_names == ["x/val1.png"] and found.category_ids.tolist() == [2]
    assert images_dir == os.fspath(made / layout.format(split="val"))
    message = refusal(made, UserError, split="test")
    assert "--split=test: neither " in message and "images/test nor " in message


def test_a_directory_of_several_splits_needs_a_choice(made):
    for split in ("train", "val"):
        put(made, f"images/{split}/1.png", picture())
    message = refusal(made, UserError)
    assert "images holds train, val: choose one by --split, or all by --split=." in message
    found, _ = read_yolo(made, split=".")
    assert found.file_names == ["a.png", "b.png", "train/1.png", "val/1.png"]


def test_labels_beside_the_images(tmp_path):
    put(tmp_path, "set/a.png", picture())
    put(tmp_path, "set/a.txt", "0 0.5 0.5 0.5 0.5")
    put(tmp_path, "set/classes.txt", "cat")
    put(tmp_path, "set/train.txt", "no label, and no image is missing for it")
    found, _ = read_yolo(tmp_path / "set")
    assert found.file_names == ["a.png"] and found.num_boxes == 1


@pytest.mark.parametrize("names", ["[cat, dog]", "{0: cat, 1: dog}"])
@pytest.mark.parametrize("root", ["path: ..\n", "path: /not/here\n", ""])
def test_data_yaml(made, names, root):
    put(made, "sub/data.yaml", f"{root}train: images\nval: images\nnc: 2\nnames: {names}\n")
    if root != "path: ..\n":
        shutil.move(made / "images", made / "sub" / "images")
        shutil.move(made / "labels", made / "sub" / "labels")
    found, _ = read_yolo(made / "sub" / "data.yaml")
    assert found.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert found.file_names == ["a.png", "b.png"] and found.num_boxes == 2


def test_data_yaml_with_several_places_and_gaps(made):
    put(made, "more/images/c.png", picture())
    put(made, "more/labels/c.txt", "9 0.5 0.5 1 1")
    put(made, "list.txt", "./images/b.png\n")
    put(made, "data.yaml", "train: [../more/images, list.txt]\nnames: {1: dog, 9: bird}\n")
    found, images_dir = read_yolo(made / "data.yaml")
    assert images_dir == os.fspath(made)
    assert found.file_names == ["more/images/c.png", "images/b.png"]
    assert found.category_ids.tolist() == [10, 2] and found.label_map.category_ids == (2, 10)


def test_darknet_lists(made, monkeypatch):
    put(made, "lists/train.txt", "images/b.png\n../images/a.png\n")
    monkeypatch.chdir(made)
    found, images_dir = read_yolo("lists/train.txt", names="classes.txt")
    assert found.file_names == ["b.png", "a.png"] and images_dir == os.fspath(made / "images")
    put(made, "labels/other.txt", "0 0.5 0.5 1 1")  # of another list
    put(made, "lists/train.txt", f"images/b.png\n{made}/images/a.png\nimages/../images/b.png\n")
    found, _ = read_yolo("lists/train.txt", names="classes.txt")
    assert found.file_names == ["b.png", "a.png"]
    put(made, "lists/train.txt", "images/b.png\nimages/c.png\n")
    assert "train.txt line 2: there is no 'images/c.png'" in refusal("lists/train.txt", names="classes.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: images\nnames: [yes, no]", "category 1 has the name True"),
        ("train: images\nnames: [cat, cat]", "categories 1 and 2 have the same name 'cat'"),
        ("train: images\nnames: {cat: 0}", "has names {'cat': 0}"),
        ("train: images\nnames: []", "there are no categories"),
        ("val: images\nnames: [cat]", "data.yaml has no 'train'"),
        ("train: pictures\nnames: [cat]", "train is 'pictures', but "),
        ("train: images\nkpt_shape: [17, 3]\nnames: [cat, dog]", "labels of poses are not read"),
        ("- a", "is not a data.yaml: it holds no keys"),
        ("", "is not a data.yaml: it holds no keys"),
        ("a: [", "is not YAML that can be read"),
        ("!!python/object/apply:os.system [true]", "is not YAML that can be read"),
    ],
)
def test_data_yaml_that_is_refused(made, text, message):
    put(made, "data.yaml", text)
    found = refusal(made / "data.yaml", UserError)
    assert message in found and "data.yaml" in found and "\n" not in found


def test_names_and_input_that_are_refused(made):
    os.remove(made / "classes.txt")
    assert "nothing names the classes of " in refusal(made, UserError)
    names = made / "n.names"
    for content, message in (
        ("cat\n\ndog\n\n", "category 2 has the name ''"),
        (b"\xff", "is not UTF-8 text"),
    ):
        put(made, "n.names", content)
        found = refusal(made, UserError, names=names)
        assert "n.names" in found and message in found
    assert "No such file" in refusal(made, OSError, names=made / "gone.names")
    assert "is not a directory, a data.yaml" in refusal(made / "gone", UserError)
    put(made, "list.txt", "images/a.png\n")
    assert "without --split, a list of images" in refusal(made / "list.txt", UserError, split="val")


def test_numbers_of_a_line():
    assert parse_line(["3.0", "0.5", "0.25", "0.5", "0.5"]) == (3, (0.25, 0.0, 0.5, 0.5))
    # A box may reach outside.
    assert parse_line(["0", "1.1", "0.5", "0.2", "0.1"])[1][0] == pytest.approx(1.0)
