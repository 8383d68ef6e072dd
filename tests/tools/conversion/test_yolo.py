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
def made(tmp_path):
    return put_yolo(tmp_path)


read_yolo, refused, faults = calls(yolo.read_yolo)


def test_a_label(made):
    put(made, "images/c.png", PIL.Image.new("RGB", (100, 50)))
    put(made, "labels/c.txt", "0 0.5 0.5 0.25 0.5\n1.0 1.2 0.5 0.2 0.1")
    found, images_dir = read_yolo(made)
    assert images_dir == os.fspath(made / "images")
    assert found.file_names == ["a.png", "b.png", "c.png"]
    assert found.image_sizes.tolist() == [[HEIGHT, WIDTH], [HEIGHT, WIDTH], [50, 100]]
    assert found.box_image.tolist() == [0, 1, 2, 2]
    boxes = [[15, 5, 10, 10], [0, 0, 20, 20], [37.5, 12.5, 25, 25], [110, 22.5, 20, 5]]
    assert found.boxes_ltwh_px.tolist() == boxes
    assert found.areas.tolist() == [100, 400, 625, 100]
    assert found.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert found.category_ids.tolist() == [1, 2, 1, 2]
    assert not found.is_crowd.any()


@pytest.mark.parametrize("names", ["obj.names", "labels/classes.txt"])
def test_files_of_names_and_six_decimals(made, names):
    shutil.move(made / "classes.txt", made / names)
    put(made, "labels/a.txt", "0 0.333333 0.5 0.25 0.5")
    found, _ = read_yolo(made)
    assert found.label_map.names == ("cat", "dog")
    assert found.boxes_ltwh_px[0].tolist() == [8.33332, 5, 10, 10]


def test_a_label_map_gives_ids_by_name(made):
    LabelMap((7, 8, 9), ("bird", "dog", "cat")).save(made / "all")
    assert read_yolo(made, label_map_file=made / "all")[0].category_ids.tolist() == [9, 8]
    LabelMap((7,), ("dog",)).save(made / "dog")
    assert "a.txt line 1 '0 0.5 0.5 0.25 0.5' has class 0, which" in faults(made, label_map_file=made / "dog")


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
    assert found.issues["label-missing"].offenders == [f"image 'c.png' ({made}/labels/c.txt)"]
    shutil.rmtree(made / "labels")
    assert "no usable box: 3 images, none with an object" in faults(made)


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
    found = yolo.turn_back(np.array([box]), orientation) * [40, 20, 40, 20]
    np.testing.assert_allclose(found, [[10, 3, 18, 5]], atol=1e-12)


def test_exif_turns_must_be_decided(made):
    stored = picture()
    stored.getexif()[0x0112] = 6
    stored.save(made / "images" / "c.jpg", exif=stored.getexif())
    put(made, "labels/c.txt", "1 0.25 0.375 0.5 0.25\n")  # ltwh 0, 10, 10, 10 in the turned image
    message = faults(made)
    assert "image 'c.jpg' (" in message and "has orientation 6" in message and "--yolo_pixels" in message
    for pixels, box in (("stored", [0, 5, 20, 5]), ("turned", [10, 10, 10, 10])):
        found, _ = read_yolo(made, yolo_pixels=pixels)
        assert found.boxes_ltwh_px[2].tolist() == box
        assert found.image_sizes[2].tolist() == [20, 40]
    put(made, "labels/c.txt", "")
    assert read_yolo(made)[0].num_images == 3


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
def test_what_is_refused(made, text, message):
    put(made, "labels/a.txt", text)
    assert message in faults(made)


def test_everything_is_listed_at_once(made):
    put(made, "labels/a.txt", "0 1 2\n0 0.5 0.5 -1 1\n5 0.5 0.5 0.2 0.2\n")
    put(made, "images/a.jpg", picture())
    put(made, "images/b.png", b"no image")
    message = faults(made)
    assert "a.txt belongs to 'a.jpg' and to 'a.png'" in message
    for expected in ("line 1 '0 1 2'", "line 2 ", "has class 5, which is not one of the 2 ", "'b.png'"):
        assert expected in message, message


def test_images_that_cannot_be_read_or_named_are_left_out_on_demand(made):
    put(made, "images/a.png", b"no image")
    shutil.copy(made / "images" / "b.png", made / "images" / os.fsdecode(b"\xff.png"))
    message = faults(made)
    assert "'a.png'" in message and "'\\udcff.png' (" in message and "its name is not UTF-8" in message
    found, _ = read_yolo(made, policy=SKIP)
    assert found.file_names == ["b.png"] and found.boxes_ltwh_px.tolist() == [[0, 0, 20, 20]]
    shutil.copy(made / "images" / "b.png", made / "images" / "c\nd.png")  # DALI would read this as two names
    assert "'c\\nd.png' (" in faults(made, policy=SKIP)


@pytest.mark.parametrize("layout", ["images/{split}", "{split}/images"])
def test_splits_of_a_directory(made, layout):
    for split in ("train", "val"):
        folder = layout.format(split=split)
        put(made, f"{folder}/x/{split}1.png", picture())
        put(made, f"{folder.replace('images', 'labels')}/x/{split}1.txt", "1 0.5 0.5 1 1")
    found, images_dir = read_yolo(made, split="val")
    assert found.file_names == ["x/val1.png"] and found.category_ids.tolist() == [2]
    assert images_dir == os.fspath(made / layout.format(split="val"))
    assert f"--split=test: neither {made}/images/test nor " in refused(made, split="test")


def test_a_directory_of_several_splits_needs_a_choice(made):
    put(made, "images/train/1.png", picture())
    assert read_yolo(made)[0].file_names == ["a.png", "b.png", "train/1.png"]
    put(made, "images/val/1.png", picture())
    assert "images contains train, val: give --split=NAME, or --split=. for all" in refused(made)
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
        for folder in ("images", "labels"):
            shutil.move(made / folder, made / "sub" / folder)
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
    monkeypatch.chdir(made)
    put(made, "labels/other.txt", "0 0.5 0.5 1 1")
    absolute_and_repeated = f"images/b.png\n{made}/images/a.png\nimages/../images/b.png"
    for lines in ("images/b.png\n../images/a.png\n", absolute_and_repeated):
        put(made, "lists/train.txt", lines)
        found, images_dir = read_yolo("lists/train.txt", names_file="classes.txt")
        assert found.file_names == ["b.png", "a.png"] and images_dir == os.fspath(made / "images")
    put(made, "lists/train.txt", "images/b.png\nimages/c.png\n")
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
def test_data_yaml_that_is_refused(made, text, message):
    put(made, "data.yaml", text)
    found = refused(made / "data.yaml")
    assert message in found and "data.yaml" in found


def test_names_and_input_that_are_refused(made):
    os.remove(made / "classes.txt")
    assert "no class names for " in refused(made)
    for text, said in (("cat\n\ndog\n\n", ": category 2 has the name ''"), (b"\xff", " is not UTF-8 text")):
        put(made, "n.names", text)
        assert f"{made}/n.names{said}" in refused(made, names_file=made / "n.names")
    assert "No such file" in refused(made, error=OSError, names_file=made / "gone.names")
    assert "give a directory, a data.yaml" in refused(made / "gone")
    put(made, "list.txt", "images/a.png\n")
    assert "without --split, a list of images" in refused(made / "list.txt", split="val")
