import os
import shutil

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from common.data.labels import LabelMap
from tests.tools.conversion.labelled_images import HEIGHT, SKIP, WIDTH, calls, picture, put, put_yolo
from tools.conversion import yolo


@pytest.fixture
def data_dir(tmp_path):
    return put_yolo(tmp_path)


read_yolo, refused, faults = calls(yolo.read_yolo)


def test_labels_become_boxes_in_pixels(data_dir):
    put(data_dir, "images/c.png", PIL.Image.new("RGB", (100, 50)))
    put(data_dir, "labels/c.txt", "0 0.5 0.5 0.25 0.5\n1.0 1.2 0.5 0.2 0.1")
    annotations, images_dir = read_yolo(data_dir)
    assert images_dir == os.fspath(data_dir / "images")
    assert annotations.file_names == ["a.png", "b.png", "c.png"]
    assert annotations.image_sizes.tolist() == [[HEIGHT, WIDTH], [HEIGHT, WIDTH], [50, 100]]
    assert annotations.box_image.tolist() == [0, 1, 2, 2]
    boxes = [[15, 5, 10, 10], [0, 0, 20, 20], [37.5, 12.5, 25, 25], [110, 22.5, 20, 5]]
    assert annotations.boxes_ltwh_px.tolist() == boxes
    assert annotations.areas.tolist() == [100, 400, 625, 100]
    assert annotations.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert annotations.category_ids.tolist() == [1, 2, 1, 2]
    assert not annotations.is_crowd.any()


@pytest.mark.parametrize("names", ["obj.names", "labels/classes.txt"])
def test_each_file_of_class_names_is_read_and_boxes_have_six_decimals(data_dir, names):
    shutil.move(data_dir / "classes.txt", data_dir / names)
    put(data_dir, "labels/a.txt", "0 0.333333 0.5 0.25 0.5")
    annotations, _ = read_yolo(data_dir)
    assert annotations.label_map.names == ("cat", "dog")
    assert annotations.boxes_ltwh_px[0].tolist() == [8.33332, 5, 10, 10]


def test_a_label_map_gives_ids_by_name(data_dir):
    LabelMap((7, 8, 9), ("bird", "dog", "cat")).save(data_dir / "all")
    assert read_yolo(data_dir, label_map_file=data_dir / "all")[0].category_ids.tolist() == [9, 8]
    LabelMap((7,), ("dog",)).save(data_dir / "dog")
    assert "a.txt line 1 '0 0.5 0.5 0.25 0.5' has class 0, which" in faults(
        data_dir, label_map_file=data_dir / "dog"
    )


def test_polygons_give_their_bounding_box(data_dir):
    put(
        data_dir,
        "labels/a.txt",
        "\ufeff0 0.25 0.5 0.75 0.25 0.5 1\r\n\r\n1 0.1 0.2 0.6 0.2 0.6 0.8 0.1 0.8\r\n",
    )
    annotations, _ = read_yolo(data_dir)
    np.testing.assert_allclose(annotations.boxes_ltwh_px[:2], [[10, 5, 20, 15], [4, 4, 20, 12]], atol=1e-9)
    assert annotations.issues["polygon"].count == 2
    assert "a.txt line 3 " in annotations.issues["polygon"].offenders[1]


def test_images_without_labels_are_kept_unless_no_image_has_labels(data_dir):
    put(data_dir, "labels/a.txt", " \n")
    put(data_dir, "images/c.png", picture())
    annotations, _ = read_yolo(data_dir)
    assert annotations.file_names == ["a.png", "b.png", "c.png"] and annotations.box_image.tolist() == [1]
    assert annotations.issues["label-missing"].offenders == [f"image 'c.png' ({data_dir}/labels/c.txt)"]
    shutil.rmtree(data_dir / "labels")
    assert "no usable box: 3 images, none with an object" in faults(data_dir)


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
    boxes_px = yolo.turn_back(np.array([box]), orientation) * [40, 20, 40, 20]
    np.testing.assert_allclose(boxes_px, [[10, 3, 18, 5]], atol=1e-12)


def test_exif_rotation_needs_yolo_pixels(data_dir):
    stored = picture()
    stored.getexif()[0x0112] = 6
    stored.save(data_dir / "images" / "c.jpg", exif=stored.getexif())
    put(data_dir, "labels/c.txt", "1 0.25 0.375 0.5 0.25\n")  # ltwh 0, 10, 10, 10 in the turned image
    message = faults(data_dir)
    assert "image 'c.jpg' (" in message and "has orientation 6" in message and "--yolo_pixels" in message
    for pixels, box in (("stored", [0, 5, 20, 5]), ("turned", [10, 10, 10, 10])):
        annotations, _ = read_yolo(data_dir, yolo_pixels=pixels)
        assert annotations.boxes_ltwh_px[2].tolist() == box
        assert annotations.image_sizes[2].tolist() == [20, 40]
    put(data_dir, "labels/c.txt", "")
    assert read_yolo(data_dir)[0].num_images == 3


REFUSED = [
    ("0 0.5 0.5 0.2 0.2\n\n0 0.5 0.5 0.25", "a.txt line 3 '0 0.5 0.5 0.25' has 4 numbers"),
    ("0 0.5 0.5 0.2 0.2 0.9", "'0 0.5 0.5 0.2 0.2 0.9' has 6 numbers: a box is class cx cy w h"),
    ("cat 0.5 0.5 0.2 0.2", "a.txt line 1 'cat 0.5 0.5 0.2 0.2' holds something that is not a number"),
    ("0 nan 0.5 0.2 0.2", "line 1 '0 nan 0.5 0.2 0.2' is not normalised"),
    ("0 2.1 0.5 0.2 0.2", "line 1 '0 2.1 0.5 0.2 0.2' is not normalised"),
    ("0 10 10 20 10 20 20", "is not normalised"),
    ("0.5 0.5 0.5 0.2 0.2", "has class 0.5, which is not one of the 2"),
    ("2 0.5 0.5 0.2 0.2", "line 1 '2 0.5 0.5 0.2 0.2' has class 2, which is not one of the 2"),
    ("0 0.5 0.5 -0.2 0.2", "line 1 '0 0.5 0.5 -0.2 0.2' has a negative side"),
    ("0 0.5 0.5 0.2 -0.2", "has a negative side"),
    (b"\xff\xfe\x00", "a.txt is not UTF-8 text"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_invalid_label_is_reported_with_file_and_line(data_dir, text, message):
    put(data_dir, "labels/a.txt", text)
    assert message in faults(data_dir)


def test_all_errors_are_listed_in_one_message(data_dir):
    put(data_dir, "labels/a.txt", "0 1 2\n0 0.5 0.5 -1 1\n5 0.5 0.5 0.2 0.2\n")
    put(data_dir, "images/a.jpg", picture())
    put(data_dir, "images/b.png", b"no image")
    message = faults(data_dir)
    assert "a.txt belongs to 'a.jpg' and to 'a.png'" in message
    for expected in ("line 1 '0 1 2'", "line 2 ", "has class 5, which is not one of the 2 ", "'b.png'"):
        assert expected in message, message


def test_unreadable_images_and_names_are_skipped_with_on_bad_image_skip(data_dir):
    put(data_dir, "images/a.png", b"no image")
    shutil.copy(data_dir / "images" / "b.png", data_dir / "images" / os.fsdecode(b"\xff.png"))
    message = faults(data_dir)
    assert "'a.png'" in message and "'\\udcff.png' (" in message and "its name is not UTF-8" in message
    annotations, _ = read_yolo(data_dir, policy=SKIP)
    assert annotations.file_names == ["b.png"] and annotations.boxes_ltwh_px.tolist() == [[0, 0, 20, 20]]
    shutil.copy(
        data_dir / "images" / "b.png", data_dir / "images" / "c\nd.png"
    )  # DALI would read this as two names
    assert "'c\\nd.png' (" in faults(data_dir, policy=SKIP)


@pytest.mark.parametrize("layout", ["images/{split}", "{split}/images"])
def test_split_selects_a_directory_in_both_layouts(data_dir, layout):
    for split in ("train", "val"):
        folder = layout.format(split=split)
        put(data_dir, f"{folder}/x/{split}1.png", picture())
        put(data_dir, f"{folder.replace('images', 'labels')}/x/{split}1.txt", "1 0.5 0.5 1 1")
    annotations, images_dir = read_yolo(data_dir, split="val")
    assert annotations.file_names == ["x/val1.png"] and annotations.category_ids.tolist() == [2]
    assert images_dir == os.fspath(data_dir / layout.format(split="val"))
    assert f"--split=test: neither {data_dir}/images/test nor " in refused(data_dir, split="test")


def test_directory_of_several_splits_needs_a_split(data_dir):
    put(data_dir, "images/train/1.png", picture())
    assert read_yolo(data_dir)[0].file_names == ["a.png", "b.png", "train/1.png"]
    put(data_dir, "images/val/1.png", picture())
    assert "images contains train, val: give --split=NAME, or --split=. for all" in refused(data_dir)
    annotations, _ = read_yolo(data_dir, split=".")
    assert annotations.file_names == ["a.png", "b.png", "train/1.png", "val/1.png"]


def test_labels_next_to_the_images_are_read(tmp_path):
    put(tmp_path, "set/a.png", picture())
    put(tmp_path, "set/a.txt", "0 0.5 0.5 0.5 0.5")
    put(tmp_path, "set/classes.txt", "cat")
    put(tmp_path, "set/train.txt", "no label, and no image is missing for it")
    annotations, _ = read_yolo(tmp_path / "set")
    assert annotations.file_names == ["a.png"] and annotations.num_boxes == 1


@pytest.mark.parametrize("names", ["[cat, dog]", "{0: cat, 1: dog}"])
@pytest.mark.parametrize("root", ["path: ..\n", "path: /not/here\n", ""])
def test_data_yaml_gives_images_and_class_names(data_dir, names, root):
    put(data_dir, "sub/data.yaml", f"{root}train: images\nval: images\nnc: 2\nnames: {names}\n")
    if root != "path: ..\n":
        for folder in ("images", "labels"):
            shutil.move(data_dir / folder, data_dir / "sub" / folder)
    annotations, _ = read_yolo(data_dir / "sub" / "data.yaml")
    assert annotations.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert annotations.file_names == ["a.png", "b.png"] and annotations.num_boxes == 2


def test_data_yaml_with_several_sources_and_gaps_in_class_numbers(data_dir):
    put(data_dir, "more/images/c.png", picture())
    put(data_dir, "more/labels/c.txt", "9 0.5 0.5 1 1")
    put(data_dir, "list.txt", "./images/b.png\n")
    put(data_dir, "data.yaml", "train: [../more/images, list.txt]\nnames: {1: dog, 9: bird}\n")
    annotations, images_dir = read_yolo(data_dir / "data.yaml")
    assert images_dir == os.fspath(data_dir)
    assert annotations.file_names == ["more/images/c.png", "images/b.png"]
    assert annotations.category_ids.tolist() == [10, 2] and annotations.label_map.category_ids == (2, 10)


def test_darknet_list_of_images_is_read(data_dir, monkeypatch):
    monkeypatch.chdir(data_dir)
    put(data_dir, "labels/other.txt", "0 0.5 0.5 1 1")
    absolute_and_repeated = f"images/b.png\n{data_dir}/images/a.png\nimages/../images/b.png"
    for lines in ("images/b.png\n../images/a.png\n", absolute_and_repeated):
        put(data_dir, "lists/train.txt", lines)
        annotations, images_dir = read_yolo("lists/train.txt", names_file="classes.txt")
        assert annotations.file_names == ["b.png", "a.png"] and images_dir == os.fspath(data_dir / "images")
    put(data_dir, "lists/train.txt", "images/b.png\nimages/c.png\n")
    assert "train.txt line 2: 'images/c.png' does not exist" in faults(
        "lists/train.txt", names_file="classes.txt"
    )


REFUSED_YAML = [
    ("train: images\nnames: [yes, no]", "category 1 has the name True"),
    ("train: images\nnames: [cat, cat]", "categories 1 and 2 have the same name 'cat'"),
    ("train: images\nnames: {cat: 0}", "is {'cat': 0}: write a list"),
    ("train: images\nnames: []", "no categories"),
    ("val: images\nnames: [cat]", "data.yaml has no split 'train'"),
    ("train: pictures\nnames: [cat]", "train is 'pictures', but "),
    ("train: images\nkpt_shape: [17, 3]\nnames: [cat, dog]", "has pose labels (kpt_shape)"),
    ("- a", "is not a data.yaml: it holds no keys"),
    ("a: [", "cannot be read as YAML"),
    ("!!python/object/apply:os.system [true]", "cannot be read as YAML"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED_YAML)
def test_invalid_data_yaml_is_one_line(data_dir, text, message):
    put(data_dir, "data.yaml", text)
    error = refused(data_dir / "data.yaml")
    assert message in error and "data.yaml" in error


def test_missing_class_names_or_input_is_one_line(data_dir):
    os.remove(data_dir / "classes.txt")
    assert "no class names for " in refused(data_dir)
    for text, reason in (("cat\n\ndog\n\n", ": category 2 has the name ''"), (b"\xff", " is not UTF-8 text")):
        put(data_dir, "n.names", text)
        assert f"{data_dir}/n.names{reason}" in refused(data_dir, names_file=data_dir / "n.names")
    assert "No such file" in refused(data_dir, error=OSError, names_file=data_dir / "gone.names")
    assert "give a directory, a data.yaml" in refused(data_dir / "gone")
    put(data_dir, "list.txt", "images/a.png\n")
    assert "without --split, a list of images" in refused(data_dir / "list.txt", split="val")
