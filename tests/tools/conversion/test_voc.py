"""Pascal VOC: BCCD's own json, drawn boxes found again, the devkit's arithmetic, and what is refused."""

import json
import os
import pathlib
import shutil
import tempfile
import time

import numpy as np
import PIL.Image
import pytest
from pycocotools import mask

from common.args import ImagePolicy
from common.datacheck.coco import load_coco
from common.datacheck.issues import DataError
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion import voc
from tools.conversion.options import Options

SKIP = ImagePolicy(on_bad_image="skip")


def xml_of(filename="a.png", size=(20, 30), objects=()):
    """An annotation file: size is (height, width), objects are (name, xmin, ymin, xmax, ymax, difficult)."""
    lines = ["<annotation>", f"<filename>{filename}</filename>"]
    if size is not None:
        lines.append(f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>")
    for name, left, top, right, bottom, difficult in objects:
        box = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        about = f"<name>{name}</name><difficult>{difficult}</difficult>"
        lines.append(f"<object>\n{about}<bndbox>{box}</bndbox></object>")
    return "\n".join([*lines, "</annotation>"])


CAT = ("cat", 3, 4, 10, 12, 0)


@pytest.fixture
def made(tmp_path):
    """A set of two images of 20 x 30 pixels, a and b, one object in each: cat, dog."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    for stem, name in (("a", "cat"), ("b", "dog")):
        PIL.Image.new("RGB", (30, 20)).save(tmp_path / "JPEGImages" / f"{stem}.png")
        write(tmp_path, stem, xml_of(f"{stem}.png", objects=[(name, 3, 4, 10, 12, 0)]))
    return tmp_path


def write(directory, stem, text):
    (directory / "Annotations" / f"{stem}.xml").write_text(text)


def read_voc(directory, images=None, *, label_map=None, policy=ImagePolicy(), **options):
    """Of the reader, with a label map that need not be a file."""
    images = images and str(images)
    with tempfile.TemporaryDirectory() as folder:
        if label_map:
            label_map.save(f"{folder}/labels.json")
            options["label_map"] = f"{folder}/labels.json"
        return voc.read_voc(Options(input=str(directory), images=images, **options), policy)


def refusal(directory, **options):
    with pytest.raises(DataError) as refused:
        read_voc(directory, **options)
    return str(refused.value)


def test_bccd_is_what_its_own_json_says(bccd):
    expected = load_coco(bccd / "instances_val.json")
    found, images_dir = read_voc(
        bccd / "annotations_voc",
        bccd / "images",
        split=os.fspath(bccd / "val.txt"),
        label_map=LabelMap.load(bccd / "instances_train.json"),
        voc_pixels="zero_based",
    )
    assert found.fingerprint() == expected.fingerprint()  # ids, names, sizes, boxes, areas, order: everything
    assert images_dir == os.fspath(bccd / "images")


def test_drawn_boxes_are_found_again(drawn, tmp_path):
    """Written as VOC defines it, 1-based with the last pixel, by other hands than those that read."""
    document = json.loads((drawn / "instances.json").read_text())
    names = {c["id"]: c["name"] for c in document["categories"]}
    shutil.copytree(drawn / "images", tmp_path / "JPEGImages")
    (tmp_path / "Annotations").mkdir()
    # VOC has no box without pixels. Crowds are written as difficult, and the option makes crowds of these.
    objects = [o for o in document["annotations"] if o["bbox"][2] > 0]
    for image in document["images"]:
        own = [
            (names[o["category_id"]], x + 1, y + 1, x + w, y + h, o["iscrowd"])
            for o in objects
            if o["image_id"] == image["id"]
            for x, y, w, h in [o["bbox"]]
        ]
        text = xml_of(image["file_name"], (image["height"], image["width"]), own)
        write(tmp_path, pathlib.Path(image["file_name"]).stem, text)
    label_map = LabelMap.from_categories(document["categories"])
    found, _ = read_voc(tmp_path, label_map=label_map, difficult="crowd")

    expected = load_coco(drawn / "instances.json")
    kept = expected.boxes_ltwh_px[:, 2] > 0
    assert found.file_names == expected.file_names
    np.testing.assert_array_equal(found.image_sizes, expected.image_sizes)
    np.testing.assert_array_equal(found.box_image, expected.box_image[kept])
    np.testing.assert_allclose(found.boxes_ltwh_px, expected.boxes_ltwh_px[kept], atol=1e-9)
    np.testing.assert_array_equal(found.category_ids, expected.category_ids[kept])
    np.testing.assert_array_equal(found.is_crowd, expected.is_crowd[kept])
    assert found.is_crowd.any()


def test_overlaps_are_those_of_the_devkit(made):
    """VOCevaldet.m counts pixels (max - min + 1); pycocotools multiplies sides."""
    boxes = np.random.default_rng(3).integers(1, 20, (12, 4))
    boxes = np.sort(boxes.reshape(12, 2, 2), axis=1).reshape(12, 4)
    write(made, "a", xml_of(objects=[("cat", *box, 0) for box in boxes.tolist()]))
    found, _ = read_voc(made)
    ours = found.boxes_ltwh_px[found.box_image == 0]
    overlap = (
        np.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - np.maximum(boxes[:, None, :2], boxes[:, :2]) + 1
    )
    shared = np.prod(np.maximum(overlap, 0), axis=2)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    expected = shared / (areas[:, None] + areas - shared)
    np.testing.assert_allclose(mask.iou(ours, ours, [0] * len(ours)), expected, atol=1e-12)


def test_ids_of_classes_are_alphabetic_and_the_same_in_every_split(made):
    write(made, "a", xml_of("a.png", objects=[("zebra", 1, 1, 5, 5, 0), ("an ape", 2, 2, 5, 5, 0)]))
    (made / "ImageSets/Main/one.txt").write_text("b\n")
    everything, _ = read_voc(made)
    one, _ = read_voc(made, split="one")
    assert everything.label_map == one.label_map == LabelMap((1, 2, 3), ("an ape", "dog", "zebra"))
    assert everything.category_ids.tolist() == [3, 1, 2]
    assert (one.file_names, one.category_ids.tolist()) == (["b.png"], [2])


def test_a_label_map_fixes_ids_and_refuses_other_names(made):
    found, _ = read_voc(made, label_map=LabelMap((5, 9), ("dog", "cat")))
    assert found.category_ids.tolist() == [9, 5]
    message = refusal(made, label_map=LabelMap((5,), ("dog",)))
    assert "Annotations/a.xml object 1 'cat' is none of 1 categories" in message


@pytest.mark.parametrize(("difficult", "boxes", "crowds"), [("keep", 2, 0), ("crowd", 2, 1), ("drop", 1, 0)])
def test_difficult_objects(made, difficult, boxes, crowds):
    write(made, "a", xml_of(objects=[("cat", 3, 4, 10, 12, 1)]))
    found, _ = read_voc(made, difficult=difficult)
    assert (found.num_boxes, int(found.is_crowd.sum())) == (boxes, crowds)
    assert found.label_map.names == ("cat", "dog")  # whatever becomes of its objects
    (offender,) = found.issues["difficult"].offenders
    assert offender.endswith(f"a.xml object 1 'cat': {difficult}")


def test_parts_other_keys_and_surrounding_blanks_are_left_out(made):
    box = "<bndbox><xmin>4</xmin><ymin>4</ymin><xmax>6</xmax><ymax>6</ymax></bndbox>"
    part = f"<part><name>head</name>{box}</part>"
    text = xml_of(objects=[(" traffic light\n", " 3.25 ", 4.5, 10.75, "\n12.0", 0)])
    text = text.replace("</bndbox>", f"</bndbox>{part}{part}<actions><jumping>1</jumping></actions>")
    write(made, "a", text.replace("<bndbox>", "<pose>Left</pose><bndbox>", 1))
    found, _ = read_voc(made)
    assert found.label_map.names == ("dog", "traffic light")
    assert found.boxes_ltwh_px.tolist() == [[2.25, 3.5, 8.5, 8.5], [2, 3, 8, 9]]


@pytest.mark.parametrize(
    ("image", "filename"),
    [
        *(("a.png", name) for name in ("a.png", "a", "", "C:\\data\\gone.jpg", "/tmp/../gone.jpg", "b.png")),
        *(("photo.v2.png", name) for name in ("photo.v2.png", "..\\x\\photo.v2.png")),
    ],
)
def test_the_filename_counts_only_where_no_image_has_the_name_of_the_xml(made, image, filename):
    (made / "JPEGImages" / "a.png").rename(made / "JPEGImages" / image)
    write(made, "a", xml_of(filename, objects=[CAT]))
    found, _ = read_voc(made)
    assert found.file_names == [image, "b.png"]


def test_of_images_that_differ_in_their_suffix_the_filename_chooses(made):
    shutil.copy(made / "JPEGImages" / "a.png", made / "JPEGImages" / "a.jpg")
    assert read_voc(made)[0].file_names == ["a.png", "b.png"]
    write(made, "a", xml_of("gone.png", objects=[CAT]))
    assert "a.xml: several images are called 'a': name one as <filename>" in refusal(made)


@pytest.mark.parametrize("size", [None, (0, 0), (0, 30), ("", ""), (20.0, 30), ("tall", 30)])
def test_a_missing_size_is_that_of_the_header(made, size):
    write(made, "a", xml_of(size=size, objects=[CAT]))
    found, _ = read_voc(made)
    assert found.image_sizes.tolist() == [[20, 30], [20, 30]]


def test_coordinates_from_0_are_told(made):
    write(made, "a", xml_of(objects=[("cat", 0, 4, 10, 12, 0)]))
    found, _ = read_voc(made)
    (offender,) = found.issues["voc-zero"].offenders
    assert offender.endswith("a.xml object 1 'cat' begins at 0, 4")
    write(made, "a", xml_of(objects=[("cat", -2, 4, 10, 12, 0)]))
    found, _ = read_voc(made, voc_pixels="zero_based")
    assert not found.issues["voc-zero"].count


def test_images_without_objects_stay_unless_all_are(made):
    write(made, "a", xml_of())
    found, _ = read_voc(made)
    assert found.box_image.tolist() == [1] and found.num_images == 2
    write(made, "b", xml_of("b.png"))
    assert "no usable box: 2 images, none with an object" in refusal(made)


def test_lists_of_names(made):
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        shutil.copy(made / folder / f"a.{suffix}", made / folder / f"a 1.{suffix}")
    in_folder, path = made / "ImageSets/Main/cat_train.txt", made / "mine.txt"
    for file, text, names in (
        (in_folder, "b -1\n\na  1\n", ["b.png", "a.png"]),  # as in VOC, per class
        (path, "a.jpg\r\n", ["a.png"]),
        (path, "a 1\n", ["a 1.png"]),  # a name with a blank, not a flag
        (path, "a\nb\na\n", ["a.png", "b.png"]),
    ):
        file.write_text(text)
        found, _ = read_voc(made, split="cat_train" if file == in_folder else os.fspath(file))
        assert found.file_names == names
    path.write_text("a\nmissing 1\nb\na\n")
    assert "mine.txt line 2: there is no 'missing 1'" in refusal(made, split=os.fspath(path))
    with pytest.raises(UserError, match=r"--split=gone: neither .*Main/gone\.txt nor gone is a file"):
        read_voc(made, split="gone")


def test_a_fault_outside_the_split_stops_only_where_the_classes_depend_on_it(made):
    write(made, "a", "<annotation>")
    (made / "ImageSets/Main/one.txt").write_text("b\n")
    assert "a.xml is not valid xml: no element found: line 1" in refusal(made, split="one")
    found, _ = read_voc(made, split="one", label_map=LabelMap((1,), ("dog",)))
    assert found.file_names == ["b.png"]


def spoil_box(old, new):
    return xml_of(objects=[CAT]).replace(old, new)


BOMB = "<!DOCTYPE annotation [<!ENTITY a 'aaaaaaaaaa'>" + "".join(
    f"<!ENTITY {name} '{f'&{inner};' * 50}'>" for inner, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.xml is not valid xml: no element found: line 1"),
        ("<annotation><object>\n<name></annotation>", "a.xml is not valid xml: mismatched tag: line 2"),
        ("<html></html>", "a.xml is not valid xml: an annotation of Pascal VOC does not begin with <html>"),
        ("version https://git-lfs.github.com/spec/v1\n", "a.xml is not valid xml: syntax error: line 1"),
        ('<?xml version="1.0" encoding="klingon"?><annotation/>', "a.xml is not valid xml: "),
        (f"{BOMB}]><annotation><filename>&h;</filename></annotation>", "declares a document type"),
        (
            '<!DOCTYPE annotation [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
            "<annotation><filename>&x;</filename></annotation>",
            "a.xml is not valid xml: declares a document type",
        ),
        (xml_of(size=(21, 30)), r"image of another size than in the annotations: image 'a.png' \("),
        (
            spoil_box("<bndbox>", "<box>").replace("</bndbox>", "</box>"),
            "object 1 'cat' has xmin, ymin, xmax, ymax = '', '', '', ''",
        ),
        (spoil_box("<ymax>12</ymax>", ""), "a.xml object 1 'cat' has xmin, .* = '3', '4', '10', ''"),
        (spoil_box(">12<", ">twelve<"), "= '3', '4', '10', 'twelve'"),
        (spoil_box(">12<", ">nan<"), "= '3', '4', '10', 'nan'"),
        (spoil_box(">12<", ">inf<"), "= '3', '4', '10', 'inf'"),
        (spoil_box(">12<", ">2<"), "object 1 'cat' has xmin, ymin, xmax, ymax = '3', '4', '10', '2'"),
        (spoil_box(">10<", ">1<"), "object 1 'cat' has xmin, ymin, xmax, ymax = '3', '4', '1', '12'"),
        (spoil_box("<name>cat</name>", ""), "a.xml object 1 '' is none of"),
    ],
)
def test_what_is_refused(made, text, message):
    write(made, "a", text)
    started = time.monotonic()
    with pytest.raises(DataError, match=message):
        read_voc(made)
    assert time.monotonic() - started < 2  # the entities are not expanded


def test_everything_is_listed_at_once(made):
    write(made, "a", xml_of(objects=[("cat", 9, 4, 3, 12, 0), ("dog", 1, 2, "x", 4, 0)]))
    write(made, "c", "<annotation>")
    (made / "JPEGImages" / "b.png").write_bytes(b"")
    message = refusal(made)
    for expected in (
        "a.xml object 1 'cat' has",
        "a.xml object 2 'dog' has xmin, ymin, xmax, ymax = '1', '2', 'x', '4'",
        "c.xml is not valid xml: no element found: line 1",
        "b.png",
    ):
        assert expected in message, message


def test_images_that_cannot_be_read_are_left_out_on_demand(made):
    (made / "JPEGImages" / "a.png").unlink()
    assert "a.xml: no image 'a' in " in refusal(made)
    found, _ = read_voc(made, policy=SKIP)
    assert found.file_names == ["b.png"] and found.issues["image-missing"].skipped
    (made / "JPEGImages" / "b.png").write_bytes(b"no image")
    assert "no usable image" in refusal(made, policy=SKIP)


def test_two_files_for_one_image(made):
    write(made, "z", xml_of("a.png", objects=[CAT]))
    message = refusal(made)
    assert "z.xml: its image 'a.png' is that of " in message
