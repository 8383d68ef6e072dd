import os
import shutil

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from common.data.labels import LabelMap
from tests.tools.conversion.exports import write_cvat_yolo
from tests.tools.conversion.labelled_images import SKIP, black_image, read_functions, write_file, write_yolo
from tools.conversion import yolo

read_yolo, user_error, data_error = read_functions(yolo.read_yolo)


@pytest.fixture
def data_dir(tmp_path):
    """images/, labels/ and classes.txt: a.png with a cat, b.png with a dog."""
    return write_yolo(tmp_path)


# --- labels ---


def test_yolo_labels_become_boxes_in_pixels(data_dir):
    write_file(data_dir, "images/c.png", PIL.Image.new("RGB", (100, 50)))
    write_file(data_dir, "labels/c.txt", "0 0.5 0.5 0.25 0.5\n1.0 1.2 0.5 0.2 0.1")
    annotations, images_dir = read_yolo(data_dir)
    assert images_dir == os.fspath(data_dir / "images")
    assert annotations.file_names == ["a.png", "b.png", "c.png"]
    assert annotations.image_sizes.tolist() == [[20, 40], [20, 40], [50, 100]]
    assert annotations.box_image.tolist() == [0, 1, 2, 2]
    boxes = [[15, 5, 10, 10], [0, 0, 20, 20], [37.5, 12.5, 25, 25], [110, 22.5, 20, 5]]
    assert annotations.boxes_ltwh_px.tolist() == boxes
    assert annotations.areas.tolist() == [100, 400, 625, 100]
    assert annotations.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert annotations.category_ids.tolist() == [1, 2, 1, 2]
    assert not annotations.is_crowd.any()


def test_yolo_boxes_are_rounded_to_six_decimals_of_a_pixel(data_dir):
    write_file(data_dir, "labels/a.txt", "0 0.3333333333 0.5 0.25 0.5")
    assert read_yolo(data_dir)[0].boxes_ltwh_px[0].tolist() == [8.333333, 5, 10, 10]


def test_repeated_yolo_box_is_dropped_and_reported(data_dir):
    lines = ("0 0.5 0.5 0.25 0.5", "1 0.5 0.5 0.25 0.5", "0 0.5 0.50 0.25 .5", "0 .5 .5 .25 .4")
    write_file(data_dir, "labels/b.txt", "\n".join(lines))
    annotations, _ = read_yolo(data_dir)
    assert annotations.box_image.tolist() == [0, 1, 1, 1]
    assert annotations.category_ids.tolist() == [1, 1, 2, 1]
    location = f"image 'b.png' ({data_dir}/labels/b.txt)"
    offenders = annotations.issues["box-repeated"].offenders
    assert offenders == [f"{location} has left, top, width, height = [15.0, 5.0, 10.0, 10.0]"]


@pytest.mark.parametrize("file", ["obj.names", "labels/classes.txt"])
def test_yolo_class_names_are_read_from_obj_names_and_labels_classes_txt(data_dir, file):
    shutil.move(data_dir / "classes.txt", data_dir / file)
    assert read_yolo(data_dir)[0].label_map.names == ("cat", "dog")


def test_label_map_gives_the_ids_of_yolo_classes_by_name(data_dir):
    LabelMap((7, 8, 9), ("bird", "dog", "cat")).save(data_dir / "all")
    assert read_yolo(data_dir, label_map_file=data_dir / "all")[0].category_ids.tolist() == [9, 8]
    LabelMap((7,), ("dog",)).save(data_dir / "dog")
    message = data_error(data_dir, label_map_file=data_dir / "dog")
    assert "a.txt line 1 '0 0.5 0.5 0.25 0.5' has class 0, which" in message


def test_yolo_polygons_become_their_bounding_boxes(data_dir):
    """The file also has a byte order mark, Windows line ends and an empty line."""
    polygons = "0 0.25 0.5 0.75 0.25 0.5 1\r\n\r\n1 0.1 0.2 0.6 0.2 0.6 0.8 0.1 0.8\r\n"
    write_file(data_dir, "labels/a.txt", f"\ufeff{polygons}")
    annotations, _ = read_yolo(data_dir)
    np.testing.assert_allclose(annotations.boxes_ltwh_px[:2], [[10, 5, 20, 15], [4, 4, 20, 12]], atol=1e-9)
    assert annotations.issues["polygon"].count == 2
    assert "a.txt line 3 " in annotations.issues["polygon"].offenders[1]


# A person of COCO-Pose as Ultralytics writes it: its box, and 17 keypoints with their visibility.
BOX = "0 0.5 0.5 0.25 0.5"
KEYPOINTS = [(0.45, 0.3, 2), (0.47, 0.28, 2), (0, 0, 0), (0.4, 0.3, 1), *[(0.5, 0.5, 2)] * 13]
POSE_3 = " ".join([BOX, *(f"{x} {y} {visibility}" for x, y, visibility in KEYPOINTS)])
POSE_2 = " ".join([BOX, *(f"{x} {y}" for x, y, _ in KEYPOINTS)])
POSES = {
    "17 x 3": (POSE_3, "kpt_shape: [17, 3]\n", None),
    "17 x 3 without data.yaml": (POSE_3, None, None),
    "1 x 3 without data.yaml": (f"{BOX} 0.45 0.3 2", None, None),
    "2 x 3 without data.yaml": (f"{BOX} 0.45 0.3 2 0.0 0.0 0", None, None),
    "17 x 2": (POSE_2, "kpt_shape: [17, 2]\n", None),
    "17 x 2 without data.yaml": (POSE_2, None, "pose"),
    "1 x 2": (f"{BOX} 0.45 0.3", "kpt_shape: [1, 2]\n", None),
}


@pytest.mark.parametrize(("line", "shape", "flag"), POSES.values(), ids=POSES)
def test_yolo_box_with_keypoints_becomes_its_box_and_is_reported(data_dir, line, shape, flag):
    write_file(data_dir, "labels/a.txt", line)
    write_file(data_dir, "labels/b.txt", "")
    write_file(data_dir, "data.yaml", f"train: images\nval: images\nnames: [person]\n{shape or ''}")
    path = data_dir / "data.yaml" if shape else data_dir
    annotations, _ = read_yolo(path, yolo_labels=flag)
    assert annotations.boxes_ltwh_px.tolist() == [[15, 5, 10, 10]]
    assert annotations.issues["pose"].count == 1 and not annotations.issues["polygon"].count


def test_yolo_line_that_does_not_fit_kpt_shape_is_an_error(data_dir):
    write_file(data_dir, "labels/a.txt", f"{BOX} 0.45 0.3 2\n")
    write_file(data_dir, "data.yaml", "train: images\nnames: [person]\nkpt_shape: [2, 3]\n")
    message = data_error(data_dir / "data.yaml")
    assert "0.45 0.3 2' has 8 numbers: a label is class cx cy w h, and 2 keypoints of 3 numbers" in message


TRIANGLE = "0 0.4 0.4 0.5 0.4 0.45 0.5"  # as keypoints: a box of 0.5 x 0.4 with the keypoint (0.45, 0.5)
POLYGONS = {
    "another number of corners": [TRIANGLE, "0 0.4 0.4 0.5 0.4 0.5 0.5 0.3 0.6"],
    "outside the image as a box": [TRIANGLE.replace("0.4", "0.7").replace("0.5", "0.9")],
    "rotated rectangles": ["0 0.4 0.5 0.5 0.4 0.6 0.5 0.5 0.6", "1 0.4 0.4 0.6 0.4 0.6 0.5 0.4 0.5"],
}


@pytest.mark.parametrize("lines", POLYGONS.values(), ids=POLYGONS)
def test_yolo_polygons_are_told_from_boxes_with_keypoints(data_dir, lines):
    write_file(data_dir, "labels/a.txt", "\n".join(lines))
    issues = read_yolo(data_dir)[0].issues
    assert issues["polygon"].count == len(lines) and not issues["pose"].count


def test_yolo_labels_that_may_be_polygons_or_keypoints_need_yolo_labels(data_dir):
    write_file(data_dir, "labels/a.txt", TRIANGLE)
    message = data_error(data_dir)
    assert f"a.txt line 1 '{TRIANGLE}'. Set --yolo_labels to polygon or to pose" in message
    for labels, box in (("polygon", [16, 8, 4, 2]), ("pose", [6, 4, 20, 8])):
        boxes = read_yolo(data_dir, yolo_labels=labels)[0].boxes_ltwh_px
        np.testing.assert_allclose(boxes[0], box, atol=1e-6)


def test_yolo_images_without_labels_are_valid_unless_no_image_has_labels(data_dir):
    write_file(data_dir, "labels/a.txt", " \n")
    write_file(data_dir, "images/c.png", black_image())
    annotations, _ = read_yolo(data_dir)
    assert annotations.file_names == ["a.png", "b.png", "c.png"] and annotations.box_image.tolist() == [1]
    assert annotations.issues["label-missing"].offenders == [f"image 'c.png' ({data_dir}/labels/c.txt)"]
    shutil.rmtree(data_dir / "labels")
    assert "no usable box: 3 images, none with an object" in data_error(data_dir)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_yolo_boxes_rotate_back_as_pillow_rotates_pixels(data_dir, orientation):
    stored = np.zeros((20, 40), np.uint8)
    stored[3:8, 10:28] = 255
    image = PIL.Image.fromarray(stored)
    image.getexif()[0x0112] = orientation
    rotated = np.asarray(PIL.ImageOps.exif_transpose(image))
    rows, columns = np.nonzero(rotated)
    height, width = rotated.shape
    left, top = columns.min() / width, rows.min() / height
    x2, y2 = (columns.max() + 1) / width, (rows.max() + 1) / height
    image.save(data_dir / "images" / "a.png", exif=image.getexif())
    write_file(data_dir, "labels/a.txt", f"0 {(left + x2) / 2} {(top + y2) / 2} {x2 - left} {y2 - top}")
    annotations, _ = read_yolo(data_dir, yolo_pixels="turned")
    assert annotations.boxes_ltwh_px[0].tolist() == [10, 3, 18, 5]


def test_yolo_labels_of_an_image_with_exif_rotation_need_the_flag_yolo_pixels(data_dir):
    stored = black_image()
    stored.getexif()[0x0112] = 6
    stored.save(data_dir / "images" / "c.jpg", exif=stored.getexif())
    write_file(data_dir, "labels/c.txt", "1 0.25 0.375 0.5 0.25\n")  # ltwh 0, 10, 10, 10 when rotated
    message = data_error(data_dir)
    assert "image 'c.jpg' (" in message and "has orientation 6" in message and "--yolo_pixels" in message
    for pixels, box in (("stored", [0, 5, 20, 5]), ("turned", [10, 10, 10, 10])):
        annotations, _ = read_yolo(data_dir, yolo_pixels=pixels)
        assert annotations.boxes_ltwh_px[2].tolist() == box
        assert annotations.image_sizes[2].tolist() == [20, 40]
    write_file(data_dir, "labels/c.txt", "")
    assert read_yolo(data_dir)[0].num_images == 3


# --- errors of labels and images ---

INVALID = {
    "four numbers": ("0 0.5 0.5 0.2 0.2\n\n0 0.5 0.5 0.25", "a.txt line 3 '0 0.5 0.5 0.25' has 4 numbers"),
    "six numbers": ("0 0.5 0.5 0.2 0.2 0.9", "0.2 0.9' has 6 numbers: a box is class cx cy w h"),
    "class name": (
        "cat 0.5 0.5 0.2 0.2",
        "'cat 0.5 0.5 0.2 0.2' holds something that is not a number",
    ),
    "nan": ("0 nan 0.5 0.2 0.2", "line 1 '0 nan 0.5 0.2 0.2' is not normalised"),
    "far outside": ("0 2.1 0.5 0.2 0.2", "line 1 '0 2.1 0.5 0.2 0.2' is not normalised"),
    "polygon in pixels": ("0 10 10 20 10 20 20", "is not normalised"),
    "fraction as class": ("0.5 0.5 0.5 0.2 0.2", "has class 0.5, which is not one of the 2"),
    "unknown class": ("2 0.5 0.5 0.2 0.2", "'2 0.5 0.5 0.2 0.2' has class 2, which is not one of the 2"),
    "negative width": ("0 0.5 0.5 -0.2 0.2", "line 1 '0 0.5 0.5 -0.2 0.2' has a negative side"),
    "negative height": ("0 0.5 0.5 0.2 -0.2", "has a negative side"),
    "binary file": (b"\xff\xfe\x00", "a.txt is not text in UTF-8"),
}


@pytest.mark.parametrize(("text", "message"), INVALID.values(), ids=INVALID)
def test_invalid_yolo_label_is_reported_with_file_and_line(data_dir, text, message):
    write_file(data_dir, "labels/a.txt", text)
    assert message in data_error(data_dir)


def test_errors_of_all_yolo_files_are_in_one_message(data_dir):
    write_file(data_dir, "labels/a.txt", "0 1 2\n0 0.5 0.5 -1 1\n5 0.5 0.5 0.2 0.2\n")
    write_file(data_dir, "images/a.jpg", black_image())
    write_file(data_dir, "images/b.png", b"no image")
    message = data_error(data_dir)
    assert "a.txt belongs to 'a.jpg' and to 'a.png'" in message
    for expected in ("line 1 '0 1 2'", "line 2 ", "has class 5, which is not one of the 2 ", "'b.png'"):
        assert expected in message, message


def test_yolo_image_damaged_or_with_a_non_utf8_name_is_an_error_and_left_out_under_policy_skip(data_dir):
    valid_image = data_dir / "images" / "b.png"
    write_file(data_dir, "images/a.png", b"no image")
    shutil.copy(valid_image, data_dir / "images" / os.fsdecode(b"\xff.png"))
    message = data_error(data_dir)
    assert "'a.png'" in message and "'\\udcff.png' (" in message and "its name is not UTF-8" in message
    annotations, _ = read_yolo(data_dir, policy=SKIP)
    assert annotations.file_names == ["b.png"] and annotations.boxes_ltwh_px.tolist() == [[0, 0, 20, 20]]


def test_image_file_name_with_line_feed_is_an_error_even_if_bad_images_are_skipped(data_dir):
    """DALI would read it as two names."""
    shutil.copy(data_dir / "images" / "b.png", data_dir / "images" / "c\nd.png")
    assert "'c\\nd.png' (" in data_error(data_dir, policy=SKIP)


def test_yolo_image_in_a_format_that_is_not_read_is_an_error_or_skipped(data_dir):
    black_image().save(data_dir / "images" / "c.gif")
    write_file(data_dir, "labels/c.txt", BOX)
    for name in (
        "images/IMG_1.CR2",
        "images/b.heic",
    ):  # without a label file; its label file is that of b.png
        write_file(data_dir, name, b"raw")
    message = data_error(data_dir)
    assert f"'{data_dir}/images/c.gif' ({data_dir}/labels/c.txt). Convert it to JPEG or PNG" in message
    annotations, _ = read_yolo(data_dir, policy=SKIP)
    assert annotations.file_names == ["a.png", "b.png"]
    assert (
        annotations.issues["unsupported-format"].count == 1 and not annotations.issues["label-unused"].count
    )
    skipped = [repr(f"{data_dir}/images/{name}") for name in ("IMG_1.CR2", "b.heic")]
    assert annotations.issues["format-skipped"].offenders == skipped


# --- layouts of a data set ---


def test_yolo_jpeg_files_with_rare_suffixes_are_read(data_dir):
    for suffix in ("jfif", "jpe", "JPE"):
        write_file(data_dir, f"images/{suffix}.jpg", black_image())
        (data_dir / "images" / f"{suffix}.jpg").rename(data_dir / "images" / f"{suffix}.{suffix}")
        write_file(data_dir, f"labels/{suffix}.txt", BOX)
    assert read_yolo(data_dir)[0].file_names == ["JPE.JPE", "a.png", "b.png", "jfif.jfif", "jpe.jpe"]


def test_yolo_label_file_with_its_suffix_in_capitals_is_read(data_dir):
    (data_dir / "labels" / "a.txt").rename(data_dir / "labels" / "a.TXT")
    annotations, _ = read_yolo(data_dir)
    assert annotations.num_boxes == 2 and not annotations.issues["label-missing"].count
    write_file(data_dir, "labels/b.TXT", BOX)
    assert read_yolo(data_dir)[0].issues["label-unused"].offenders == [repr(f"{data_dir}/labels/b.TXT")]


def test_hidden_files_and_system_folders_of_yolo_data_are_skipped_and_named(data_dir):
    hidden = ["images/._a.png", "images/.ipynb_checkpoints/a.png", "images/@eaDir/b.png", "labels/._a.txt"]
    for name in hidden:
        write_file(data_dir, name, b"no image")
    write_file(data_dir, "images/train/1.png", black_image())  # .ipynb_checkpoints is no split beside it
    annotations, _ = read_yolo(data_dir)
    assert annotations.file_names == ["a.png", "b.png", "train/1.png"]
    skipped = [
        f"{data_dir}/{name}" for name in ("images/._a.png", "images/.ipynb_checkpoints", "images/@eaDir")
    ]
    assert annotations.issues["file-hidden"].offenders == [
        *map(repr, skipped),
        repr(f"{data_dir}/labels/._a.txt"),
    ]


def test_yolo_images_behind_a_link_to_a_folder_are_read_with_their_labels(data_dir):
    for folder in ("images", "labels"):
        (data_dir / folder).rename(data_dir / f"real_{folder}")
        (data_dir / folder).mkdir()
        (data_dir / folder / "link").symlink_to(data_dir / f"real_{folder}")
    annotations, _ = read_yolo(data_dir)
    assert annotations.file_names == ["link/a.png", "link/b.png"] and annotations.num_boxes == 2
    assert not annotations.issues["label-unused"].count


UNUSED = {
    "labels/gone.txt": BOX,
    "labels/deep/er/gone.txt": "",
    "labels/A.txt": BOX,
    "images/a.txt": BOX,
}


@pytest.mark.parametrize("name", UNUSED)
def test_yolo_label_file_without_an_image_is_named(data_dir, name):
    write_file(data_dir, name, UNUSED[name])
    for other in ("labels/classes.txt", "labels/train.txt", "images/README.txt"):
        write_file(data_dir, other, "cat\ndog\n")
    assert read_yolo(data_dir)[0].issues["label-unused"].offenders == [repr(f"{data_dir}/{name}")]


CASE, FORM = "other upper and lower case", "another Unicode normal form"
MISNAMED = {
    "case": ("images/c.png", "labels/C.txt", CASE),
    "case of the extension": ("images/c.png", "labels/c.Txt", CASE),
    "case of a folder": ("images/Cam1/c.png", "labels/cam1/c.txt", CASE),
    "Unicode form": ("images/\u00e9.png", "labels/e\u0301.txt", FORM),
}


@pytest.mark.parametrize(("image", "file", "difference"), MISNAMED.values(), ids=MISNAMED)
def test_yolo_label_file_with_almost_the_name_of_an_image_is_an_error(data_dir, image, file, difference):
    """Otherwise the image would be trained as background."""
    write_file(data_dir, image, black_image())
    write_file(data_dir, file, BOX)
    message = data_error(data_dir)
    name = image.removeprefix("images/")
    text = f"{f'{data_dir}/{file}'!r} and image {name!r}, in {difference}: rename one of the two"
    assert text in message and "\n" not in message


@pytest.mark.parametrize("labels", ["images", "labels"])
def test_label_file_with_almost_the_name_of_an_image_of_a_darknet_list_is_an_error(tmp_path, labels):
    for image in ("a", "b"):
        write_file(tmp_path, f"images/{image}.png", black_image())
    for label_file in ("A", "b", "gone"):
        write_file(tmp_path, f"{labels}/{label_file}.txt", BOX)
    write_file(tmp_path, "train.txt", "images/a.png\nimages/b.png\n")
    write_file(tmp_path, "classes.txt", "cat\ndog\n")
    for path in ("train.txt", "."):
        message = data_error(tmp_path / path)
        assert f"'{tmp_path}/{labels}/A.txt' and image 'a.png', in {CASE}: rename one of the two" in message


def test_yolo_labels_of_nested_images_folders_are_read_and_named_where_they_belong(data_dir):
    for folder in ("images", "labels"):
        (data_dir / folder).rename(data_dir / "other")
        (data_dir / folder).mkdir()
        (data_dir / "other").rename(data_dir / folder / "images")
    (data_dir / "labels" / "images" / "a.txt").unlink()
    annotations, _ = read_yolo(data_dir)
    assert annotations.file_names == ["images/a.png", "images/b.png"] and annotations.box_image.tolist() == [
        1
    ]
    missing = annotations.issues["label-missing"].offenders
    assert missing == [f"image 'images/a.png' ({data_dir}/labels/images/a.txt)"]
    write_file(data_dir, "images/labels/a.txt", BOX)
    write_file(data_dir, "images/labels/b.txt", BOX)  # the last folder `images` counts
    annotations, _ = read_yolo(data_dir, split=".")
    assert annotations.num_boxes == 2 and annotations.category_ids.tolist() == [1, 1]
    assert annotations.issues["label-unused"].offenders == [repr(f"{data_dir}/labels/images/b.txt")]


def test_yolo_labels_of_other_splits_are_not_unused(data_dir):
    for split in ("train", "val"):
        write_file(data_dir, f"images/{split}/1.png", black_image())
        write_file(data_dir, f"labels/{split}/1.txt", BOX)
    assert not read_yolo(data_dir, split="val")[0].issues["label-unused"].count


@pytest.mark.parametrize("layout", ["images/{split}", "{split}/images"])
def test_split_flag_selects_a_yolo_directory_in_both_directory_layouts(data_dir, layout):
    for split in ("train", "val"):
        folder = layout.format(split=split)
        write_file(data_dir, f"{folder}/x/{split}1.png", black_image())
        write_file(data_dir, f"{folder.replace('images', 'labels')}/x/{split}1.txt", "1 0.5 0.5 1 1")
    annotations, images_dir = read_yolo(data_dir, split="val")
    assert annotations.file_names == ["x/val1.png"] and annotations.category_ids.tolist() == [2]
    assert images_dir == os.fspath(data_dir / layout.format(split="val"))
    assert f"--split=test: neither {data_dir}/images/test nor " in user_error(data_dir, split="test")


def test_yolo_directory_with_several_splits_needs_the_split_flag(data_dir):
    write_file(data_dir, "images/train/1.png", black_image())
    assert read_yolo(data_dir)[0].file_names == ["a.png", "b.png", "train/1.png"]
    write_file(data_dir, "images/val/1.png", black_image())
    assert "images contains train, val: give --split=NAME, or --split=. for all" in user_error(data_dir)
    annotations, _ = read_yolo(data_dir, split=".")
    assert annotations.file_names == ["a.png", "b.png", "train/1.png", "val/1.png"]


def test_yolo_label_files_in_the_directory_of_the_images_are_read(tmp_path):
    write_file(tmp_path, "set/a.png", black_image())
    write_file(tmp_path, "set/a.txt", "0 0.5 0.5 0.5 0.5")
    write_file(tmp_path, "set/classes.txt", "cat")
    write_file(tmp_path, "set/train.txt", "no label, and no image is missing for it")
    annotations, _ = read_yolo(tmp_path / "set")
    assert annotations.file_names == ["a.png"] and annotations.num_boxes == 1


DATA_YAML = [("path: ..\n", "[cat, dog]"), ("path: /not/here\n", "{0: cat, 1: dog}"), ("", "[cat, dog]")]


@pytest.mark.parametrize(("root", "names"), DATA_YAML, ids=["parent", "missing directory", "no path"])
def test_yolo_data_yaml_with_any_or_no_path_key_gives_images_and_class_names(data_dir, root, names):
    write_file(data_dir, "sub/data.yaml", f"{root}train: images\nval: images\nnc: 2\nnames: {names}\n")
    if root != "path: ..\n":
        for folder in ("images", "labels"):
            shutil.move(data_dir / folder, data_dir / "sub" / folder)
    annotations, _ = read_yolo(data_dir / "sub" / "data.yaml")
    assert annotations.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert annotations.file_names == ["a.png", "b.png"] and annotations.num_boxes == 2


def test_yolo_data_yaml_may_have_several_image_sources_and_gaps_in_class_numbers(data_dir):
    write_file(data_dir, "more/images/c.png", black_image())
    write_file(data_dir, "more/labels/c.txt", "9 0.5 0.5 1 1")
    write_file(data_dir, "list.txt", "./images/b.png\n")
    write_file(data_dir, "data.yaml", "train: [../more/images, list.txt]\nnames: {1: dog, 9: bird}\n")
    annotations, images_dir = read_yolo(data_dir / "data.yaml")
    assert images_dir == os.fspath(data_dir)
    assert annotations.file_names == ["more/images/c.png", "images/b.png"]
    assert annotations.category_ids.tolist() == [10, 2] and annotations.label_map.category_ids == (2, 10)


LISTS = {
    "relative": "images/b.png\n../images/a.png\n",
    "absolute and repeated": "images/b.png\n{data_dir}/images/a.png\nimages/../images/b.png",
}


@pytest.mark.parametrize("lines", LISTS.values(), ids=LISTS)
def test_darknet_image_list_is_read(data_dir, monkeypatch, lines):
    """Paths are relative to the working directory or to the list."""
    monkeypatch.chdir(data_dir)
    write_file(data_dir, "labels/other.txt", "0 0.5 0.5 1 1")
    write_file(data_dir, "lists/train.txt", lines.format(data_dir=data_dir))
    annotations, images_dir = read_yolo("lists/train.txt", names_file="classes.txt")
    assert annotations.file_names == ["b.png", "a.png"] and images_dir == os.fspath(data_dir / "images")


@pytest.mark.parametrize("folder", [".", "data"])
def test_darknet_image_list_with_paths_below_data_is_read_by_the_place_of_the_list(tmp_path, folder):
    """CVAT and datumaro write the prefix data/, and Darknet's own lists are in data/."""
    path = write_cvat_yolo(tmp_path / folder)
    annotations, images_dir = read_yolo(path)
    assert annotations.boxes_ltwh_px.tolist() == [[3, 4, 7, 8], [0, 5, 20, 10]]
    assert annotations.label_map.names == ("cat", "dog")
    assert images_dir == os.fspath(path.parent / "obj_train_data")
    path.write_text(path.read_text().replace("/", "\\"))
    assert read_yolo(path)[0].fingerprint() == annotations.fingerprint()


def test_missing_image_of_a_darknet_list_is_reported_with_its_line_and_a_similar_existing_path(
    data_dir, monkeypatch
):
    monkeypatch.chdir(data_dir)
    write_file(data_dir, "train.txt", "images/b.png\nimages/c.png\n/content/a.png\nimages/B.png")
    message = data_error("train.txt", names_file="classes.txt")
    assert "train.txt line 2: 'images/c.png' does not exist;" in message
    assert "train.txt line 3: '/content/a.png' does not exist, but 'images/a.png' exists;" in message
    text = "but 'images/b.png' exists, in other upper and lower case: rename one of the two. "
    assert f"train.txt line 4: 'images/B.png' does not exist, {text}" in message


def test_yolo_directory_without_images_is_refused_with_what_to_give(data_dir):
    message = user_error(data_dir / "labels", names_file=data_dir / "classes.txt")
    assert message == (
        f"--input={data_dir}/labels has no images: give the directory that holds the images and their labels"
    )


# --- errors of class names and of the input ---

INVALID_YAML = {
    "boolean as name": ("train: images\nnames: [cat, yes]", "YAML reads yes as True: quote it, 'yes'"),
    "number as name": ("train: images\nnames:\n  0: cat\n  1: 007", "YAML reads 007 as 7: quote it, '007'"),
    "date as name": (
        "train: images\nnames: [2020-01-31]",
        "YAML reads 2020-01-31 as datetime.date(2020, 1, 31)",
    ),
    "null as name": ("train: images\nnames: [Null, ~]", "YAML reads Null as None: quote it, 'Null'"),
    "empty name": ("train: images\nnames: {0: cat, 1: }", "category 2 has the name None"),
    "list as name": ("train: images\nnames: [[cat]]", "category 1 has the name ['cat']"),
    "boolean as number": ("train: images\nnames: {yes: cat}", "is {True: 'cat'}: write a list"),
    "repeated number": ("train: images\nnames: {0: cat, 0: dog}", "data.yaml repeats a number: give each"),
    "repeated name": ("train: images\nnames: [cat, cat]", "categories 1 and 2 have the same name 'cat'"),
    "names as keys": ("train: images\nnames: {cat: 0}", "is {'cat': 0}: write a list"),
    "no name": ("train: images\nnames: []", "no categories"),
    "no split train": ("val: images\nnames: [cat]", "data.yaml has no split 'train'"),
    "missing directory": ("train: pictures\nnames: [cat]", "train is 'pictures', but "),
    "keypoints": ("train: images\nkpt_shape: 17\nnames: [cat]", "is 17: write [number of keypoints, 2 or 3]"),
    "list": ("- a", "is not a data.yaml: it holds no keys"),
    "broken YAML": ("a: [", "cannot be read as YAML"),
    "Python object": ("!!python/object/apply:os.system [true]", "cannot be read as YAML"),
}


@pytest.mark.parametrize(("text", "reason"), INVALID_YAML.values(), ids=INVALID_YAML)
def test_invalid_data_yaml_is_refused_with_the_reason(data_dir, text, reason):
    write_file(data_dir, "data.yaml", text)
    message = user_error(data_dir / "data.yaml")
    assert reason in message and "data.yaml" in message


def test_names_that_a_data_yaml_merges_from_an_anchor_are_read(data_dir):
    write_file(data_dir, "data.yaml", "base: &base {names: [cat, dog]}\n<<: *base\ntrain: images\n")
    assert read_yolo(data_dir / "data.yaml")[0].label_map.names == ("cat", "dog")


def test_missing_or_invalid_yolo_class_names_are_refused(data_dir):
    os.remove(data_dir / "classes.txt")
    assert "no class names for " in user_error(data_dir)
    names_file = data_dir / "n.names"
    assert "No such file" in user_error(data_dir, error=OSError, names_file=names_file)
    write_file(data_dir, "n.names", "cat\n\ndog\n\n")
    assert f"{names_file}: category 2 has the name ''" in user_error(data_dir, names_file=names_file)
    write_file(data_dir, "n.names", b"\xff")
    assert f"{names_file} is not text in UTF-8: save it as UTF-8" in user_error(
        data_dir, names_file=names_file
    )


def test_yolo_input_that_is_missing_or_an_image_list_given_with_split_is_refused(data_dir):
    assert "give a directory, a data.yaml" in user_error(data_dir / "gone")
    write_file(data_dir, "list.txt", "images/a.png\n")
    assert "without --split, a list of images" in user_error(data_dir / "list.txt", split="val")
