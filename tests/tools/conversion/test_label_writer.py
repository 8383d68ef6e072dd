"""Tests that labels written for YOLO, Pascal VOC and CVAT are read back, and what the files contain."""

import functools
import json
import pathlib
from xml.etree import ElementTree

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from common.data.coco import load_coco
from tests.refusal import refusal
from tests.tools.conversion.labelled_images import options_of, write_file
from tools.convert import convert

# Target -> flags with which it is read back, and the precision of its boxes in pixels.
TARGETS = {
    "yolo": ({"yolo_pixels": "stored"}, 1e-5),
    "voc": ({"difficult": "crowd"}, 1e-3),
    "cvat": ({}, 1e-2),
}


def run(source, target, **options):
    return convert(source, target, options_of(**options))


refused = functools.partial(refusal, run)


def objects_of(annotations, *, with_crowds):
    """Returns {file name: sorted [(category id, is crowd, left, top, right, bottom in pixels)]}."""
    boxes, _, has_area = annotations.clipped_boxes
    sizes = annotations.image_sizes[annotations.box_image][:, [1, 0, 1, 0]]
    rows = zip(annotations.category_ids, annotations.is_crowd, *(boxes * sizes).T, strict=True)
    objects = {name: [] for name in annotations.file_names}
    for image, row, is_shown in zip(annotations.box_image, rows, has_area, strict=True):
        if is_shown and (with_crowds or not row[1]):
            objects[annotations.file_names[image]].append(row)
    return {name: np.array(sorted(rows), np.float64) for name, rows in objects.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_coco_written_as_labels_and_read_back_has_equal_boxes_images_and_categories(drawn, tmp_path, target):
    flags, precision = TARGETS[target]
    names = {"input": drawn / "instances.json", "images": drawn / "images"}
    run("coco", target, **names, output=tmp_path / "labels")
    names = {"input": tmp_path / "labels", "output": tmp_path / "back.json"}
    _, copies = run(target, "coco", **names, label_map=drawn / "instances.json", **flags)
    truth, result = load_coco(drawn / "instances.json"), load_coco(tmp_path / "back.json", copies)
    assert result.label_map == truth.label_map
    expected = objects_of(truth, with_crowds=target == "voc")
    actual = objects_of(result, with_crowds=True)
    assert expected.keys() == actual.keys()
    for name, rows in expected.items():
        assert actual[name].shape == rows.shape
        np.testing.assert_allclose(actual[name], rows, atol=precision)
        copy = tmp_path / "labels" / ("JPEGImages" if target == "voc" else "images") / name
        assert copy.read_bytes() == (drawn / "images" / name).read_bytes()


def write_set(directory, boxes, name="sub/a.png", orientation=1, size=(40, 20)):
    """Writes a COCO set of one image; `size` is (width, height)."""
    image = PIL.Image.new("RGB", size)
    image.getexif()[0x0112] = orientation
    (directory / "photos" / name).parent.mkdir(parents=True)
    image.save(directory / "photos" / name, exif=image.getexif())
    objects = [{"image_id": 7, "category_id": 5, "bbox": box} for box in boxes]
    document = {
        "images": [{"id": 7, "file_name": name, "width": size[0], "height": size[1]}],
        "annotations": objects,
        "categories": [{"id": 2, "name": "dog"}, {"id": 5, "name": "yes"}],
    }
    write_file(directory, "photos.json", json.dumps(document))
    return {"input": directory / "photos.json", "images": directory / "photos"}


def test_labels_have_the_numbers_that_each_format_defines(tmp_path):
    names = write_set(tmp_path, [[10, 5, 20, 10], [-5, 0, 15, 20]])
    run("coco", "yolo", **names, output=tmp_path / "yolo")
    assert (tmp_path / "yolo/labels/sub/a.txt").read_text().splitlines() == [
        "1 0.50000000 0.50000000 0.50000000 0.50000000",
        "1 0.12500000 0.50000000 0.25000000 1.00000000",  # clipped to the image
    ]
    assert (tmp_path / "yolo/classes.txt").read_text() == "dog\nyes\n"
    assert (tmp_path / "yolo/data.yaml").read_text() == "train: images\nnames:\n  0: dog\n  1: 'yes'\n"
    for pixels, first in (("one_based", ["11", "6", "30", "15"]), ("zero_based", ["10", "5", "30", "15"])):
        run("coco", "voc", **names, output=tmp_path / pixels, voc_pixels=pixels)
        root = ElementTree.parse(tmp_path / pixels / "Annotations/sub/a.xml").getroot()
        assert [root.findtext(f"size/{side}") for side in ("width", "height")] == ["40", "20"]
        assert root.findtext("filename") == "a.png" and root.findtext("object/name") == "yes"
        assert [edge.text for edge in root.find("object/bndbox")] == first
    run("coco", "cvat", **names, output=tmp_path / "cvat")
    root = ElementTree.parse(tmp_path / "cvat/annotations.xml").getroot()
    assert [name.text for name in root.iterfind("meta/task/labels/label/name")] == ["dog", "yes"]
    assert root.find("image").attrib == {"id": "0", "name": "sub/a.png", "width": "40", "height": "20"}
    edges = [[box.get(key) for key in ("xtl", "ytl", "xbr", "ybr")] for box in root.iterfind("image/box")]
    assert edges == [["10.00", "5.00", "30.00", "15.00"], ["0.00", "0.00", "10.00", "20.00"]]


@pytest.mark.parametrize("folder", ["images", "images/cam1", "cam1/images"])
def test_image_of_a_folder_images_has_its_label_where_trainers_of_yolo_look(tmp_path, folder):
    names = write_set(tmp_path, [[10, 5, 20, 10]], name=f"{folder}/a.png")
    run("coco", "yolo", **names, output=tmp_path / "yolo")
    (image,) = tmp_path.glob("yolo/**/a.png")
    # Ultralytics replaces the last folder `images` of a path: img2label_paths in ultralytics/data/utils.py
    label = "/labels/".join(str(image.with_suffix(".txt")).rsplit("/images/", 1))
    assert pathlib.Path(label).read_text() == "1 0.50000000 0.50000000 0.50000000 0.50000000\n"


@pytest.mark.parametrize("orientation", range(2, 9))
def test_cvat_boxes_of_an_image_with_exif_rotation_are_those_that_pillow_shows(tmp_path, orientation, capsys):
    names = write_set(tmp_path, [[3, 4, 7, 8]], orientation=orientation)
    mask = PIL.Image.new("1", (40, 20))
    mask.paste(1, (3, 4, 10, 12))
    mask.getexif()[0x0112] = orientation
    left, top, right, bottom = PIL.ImageOps.exif_transpose(mask).getbbox()
    run("coco", "cvat", **names, output=tmp_path / "cvat")
    box = ElementTree.parse(tmp_path / "cvat/annotations.xml").getroot().find("image/box")
    edges = [float(box.get(key)) for key in ("xtl", "ytl", "xbr", "ybr")]
    assert edges == [left, top, right, bottom]
    parts, _ = run("cvat", "coco", input=tmp_path / "cvat", output=tmp_path / "back.json")
    assert next(iter(parts.values())).boxes_ltwh_px.tolist() == [[3, 4, 7, 8]]
    run("coco", "yolo", **names, output=tmp_path / "yolo")
    assert (
        "1 images have an EXIF orientation, and their labels refer to the stored" in capsys.readouterr().err
    )


def test_labels_are_not_written_into_a_directory_with_files_or_over_each_other(tmp_path):
    names = write_set(tmp_path, [[3, 4, 7, 8]])
    write_file(tmp_path, "labels/mine.txt", "corrected")
    message = refused("coco", "cvat", **names, output=tmp_path / "labels")
    assert message.endswith("labels exists already: give an empty or a new directory")
    assert refused("coco", "cvat", **names, output="s3://a/b").startswith("--output=s3://a/b is in a bucket")
    document = json.loads(names["input"].read_text())
    document["images"].append({"id": 8, "file_name": "sub/a.jpg", "width": 40, "height": 20})
    names["input"].write_text(json.dumps(document))
    PIL.Image.new("RGB", (40, 20)).save(tmp_path / "photos/sub/a.jpg")
    message = refused("coco", "voc", **names, output=tmp_path / "voc")
    assert message == "'sub/a.png' and 'sub/a.jpg' would have the same labels: rename one of them"
    assert not (tmp_path / "voc").exists()
    document["images"][1]["file_name"] = "sub/a.png"
    names["input"].write_text(json.dumps(document))
    message = refused("coco", "cvat", **names, output=tmp_path / "cvat")
    assert message == "'sub/a.png' and 'sub/a.png' would have the same labels: merge these images"


def test_class_name_with_a_line_break_has_one_line_in_classes_txt_and_no_xml_with_control_characters(
    tmp_path,
):
    names = write_set(tmp_path, [[3, 4, 7, 8]])
    document = json.loads(names["input"].read_text())
    document["categories"] = [{"id": 1, "name": "a\nb"}, {"id": 5, "name": "bell\a"}]
    document["annotations"][0]["category_id"] = 1
    names["input"].write_text(json.dumps(document))
    run("coco", "yolo", **names, output=tmp_path / "yolo")
    assert (tmp_path / "yolo/classes.txt").read_text() == "a b\nbell\a\n"
    for target in ("voc", "cvat"):
        message = refused("coco", target, **names, output=tmp_path / target)
        assert message == r"'bell\x07' has a character that xml cannot hold: rename it, or use --to=yolo"
        assert not (tmp_path / target).exists()


def test_records_are_converted_to_labels_without_other_copies_of_their_images(drawn_records, tmp_path):
    parts, _ = run("tfrecord", "yolo", input=f"{drawn_records}-*.tfrecord", output=tmp_path / "yolo")
    (annotations,) = parts.values()
    assert len(list((tmp_path / "yolo/images").iterdir())) == annotations.num_images == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["yolo"]
