import shutil

import numpy as np
import pytest
from pycocotools import mask

from common.data.labels import LabelMap
from tests.tools.conversion.labelled_images import HEIGHT, SKIP, WIDTH, calls, picture, put
from tools.conversion import voc

CAT = ("cat", 3, 4, 10, 12, 0)
WITH_DOCTYPE = '<!DOCTYPE annotation [<!ENTITY x SYSTEM "/etc/passwd">]><annotation>&x;</annotation>'


def xml_of(filename="a.png", size=(HEIGHT, WIDTH), objects=()):
    """`size` is (height, width). Each object is (name, xmin, ymin, xmax, ymax, difficult)."""
    lines = ["<annotation>", f"<filename>{filename}</filename>"]
    if size is not None:
        lines.append(f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>")
    for name, left, top, right, bottom, difficult in objects:
        box = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        attributes = f"<name>{name}</name><difficult>{difficult}</difficult>"
        lines.append(f"<object>\n{attributes}<bndbox>{box}</bndbox></object>")
    return "\n".join([*lines, "</annotation>"])


def write(directory, stem, text):
    put(directory, f"Annotations/{stem}.xml", text)


@pytest.fixture
def voc_dir(tmp_path):
    for stem, name in (("a", "cat"), ("b", "dog")):
        put(tmp_path, f"JPEGImages/{stem}.png", picture())
        write(tmp_path, stem, xml_of(f"{stem}.png", objects=[(name, *CAT[1:])]))
    put(tmp_path, "ImageSets/Main/one.txt", "b\n")
    return tmp_path


read_voc, refused, faults = calls(voc.read_voc)


def test_boxes_have_the_overlaps_of_the_voc_devkit(voc_dir):
    """In the devkit's VOCevaldet.m, a side has max - min + 1 pixels."""
    boxes = np.random.default_rng(3).integers(1, 20, (12, 2, 2))
    boxes = np.sort(boxes, axis=1).reshape(12, 4)
    write(voc_dir, "a", xml_of(objects=[("cat", *box, 0) for box in boxes.tolist()]))
    annotations, _ = read_voc(voc_dir)
    ours = annotations.boxes_ltwh_px[annotations.box_image == 0]
    first, last = np.maximum(boxes[:, None, :2], boxes[:, :2]), np.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = np.prod(np.maximum(last - first + 1, 0), axis=2)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    expected = shared / (areas[:, None] + areas - shared)
    np.testing.assert_allclose(mask.iou(ours, ours, [0] * len(ours)), expected, atol=1e-12)


def test_ids_of_classes_are_alphabetic_and_the_same_in_every_split(voc_dir):
    write(voc_dir, "a", xml_of(objects=[("zebra", 1, 1, 5, 5, 0), ("an ape", 2, 2, 2, 2, 0)]))
    all_images, _ = read_voc(voc_dir)
    subset, _ = read_voc(voc_dir, split="one")
    assert all_images.label_map == subset.label_map == LabelMap((1, 2, 3), ("an ape", "dog", "zebra"))
    assert all_images.category_ids.tolist() == [3, 1, 2]
    assert (subset.file_names, subset.category_ids.tolist()) == (["b.png"], [2])


def test_a_label_map_fixes_ids_and_refuses_other_names(voc_dir):
    LabelMap((5, 9), ("dog", "cat")).save(voc_dir / "both")
    assert read_voc(voc_dir, label_map_file=voc_dir / "both")[0].category_ids.tolist() == [9, 5]
    LabelMap((5,), ("dog",)).save(voc_dir / "dog")
    assert "a.xml object 1 'cat' is not one of 1 categories" in faults(
        voc_dir, label_map_file=voc_dir / "dog"
    )
    write(voc_dir, "a", "<annotation>")
    assert read_voc(voc_dir, split="one", label_map_file=voc_dir / "dog")[0].file_names == ["b.png"]
    assert "a.xml is not valid xml: no element found: line 1" in faults(voc_dir, split="one")


@pytest.mark.parametrize(("difficult", "boxes", "crowds"), [("keep", 2, 0), ("crowd", 2, 1), ("drop", 1, 0)])
def test_difficult_objects_are_kept_marked_or_dropped(voc_dir, difficult, boxes, crowds):
    write(voc_dir, "a", xml_of(objects=[(*CAT[:5], 1)]))
    annotations, _ = read_voc(voc_dir, difficult=difficult)
    assert (annotations.num_boxes, int(annotations.is_crowd.sum())) == (boxes, crowds)
    assert annotations.label_map.names == (
        "cat",
        "dog",
    )  # the label map keeps "cat" even if all cats are left out
    assert annotations.issues["difficult"].offenders == [
        f"{voc_dir}/Annotations/a.xml object 1 'cat': {difficult}"
    ]


def test_parts_other_keys_and_surrounding_blanks_are_left_out(voc_dir):
    box = "<bndbox><xmin>4</xmin><ymin>4</ymin><xmax>6</xmax><ymax>6</ymax></bndbox>"
    part = f"<part><name>head</name>{box}</part>"
    text = xml_of(objects=[(" traffic light\n", " 3.25 ", 4.5, 10.75, "\n12.0", 0)])
    text = text.replace("</bndbox>", f"</bndbox>{part}{part}<actions><jumping>1</jumping></actions>")
    write(voc_dir, "a", text.replace("<bndbox>", "<pose>Left</pose><bndbox>", 1))
    annotations, _ = read_voc(voc_dir)
    assert annotations.label_map.names == ("dog", "traffic light")
    assert annotations.boxes_ltwh_px.tolist() == [[2.25, 3.5, 8.5, 8.5], [2, 3, 8, 9]]


FILE_NAMES = [
    *(("a.png", name) for name in ("a.png", "a", "", "C:\\data\\gone.jpg", "/tmp/../gone.jpg", "b.png")),
    *(("photo.v2.png", name) for name in ("photo.v2.png", "..\\x\\photo.v2.png")),
]


@pytest.mark.parametrize(("image", "filename"), FILE_NAMES)
def test_filename_is_used_only_if_no_image_has_the_name_of_the_xml(voc_dir, image, filename):
    (voc_dir / "JPEGImages" / "a.png").rename(voc_dir / "JPEGImages" / image)
    write(voc_dir, "a", xml_of(filename, objects=[CAT]))
    assert read_voc(voc_dir)[0].file_names == [image, "b.png"]


def test_filename_selects_among_images_that_differ_in_their_suffix(voc_dir):
    shutil.copy(voc_dir / "JPEGImages" / "a.png", voc_dir / "JPEGImages" / "a.jpg")
    assert read_voc(voc_dir)[0].file_names == ["a.png", "b.png"]
    write(voc_dir, "a", xml_of("gone.png", objects=[CAT]))
    assert "a.xml: several images are called 'a': name one in <filename>" in faults(voc_dir)


@pytest.mark.parametrize("size", [None, (0, 0), (0, 40), ("", ""), (20.0, 40), ("tall", 40)])
def test_missing_size_is_read_from_the_image_header(voc_dir, size):
    write(voc_dir, "a", xml_of(size=size, objects=[CAT]))
    assert read_voc(voc_dir)[0].image_sizes.tolist() == [[20, 40], [20, 40]]


def test_zero_based_coordinates_give_a_warning(voc_dir):
    write(voc_dir, "a", xml_of(objects=[("cat", 0, 4, 10, 12, 0)]))
    offenders = read_voc(voc_dir)[0].issues["voc-zero"].offenders
    assert offenders == [f"{voc_dir}/Annotations/a.xml object 1 'cat' begins at 0, 4"]
    write(voc_dir, "a", xml_of(objects=[("cat", -2, 4, 10, 12, 0)]))
    assert not read_voc(voc_dir, voc_pixels="zero_based")[0].issues["voc-zero"].count


def test_split_list_with_suffixes_flags_and_blanks_is_read(voc_dir):
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        shutil.copy(voc_dir / folder / f"a.{suffix}", voc_dir / folder / f"a 1.{suffix}")
    for text, names in (
        ("b -1\n\na  1\n", ["b.png", "a.png"]),  # VOC's list of a class: names with flags
        ("a.jpg\r\n", ["a.png"]),
        ("a 1\n", ["a 1.png"]),
        ("a\nb\na\n", ["a.png", "b.png"]),
    ):
        put(voc_dir, "mine.txt", text)
        assert read_voc(voc_dir, split=voc_dir / "mine.txt")[0].file_names == names
    put(voc_dir, "mine.txt", "a\nmissing 1\nb\na\n")
    assert "mine.txt line 2: 'missing 1' does not exist" in faults(voc_dir, split=voc_dir / "mine.txt")
    assert refused(voc_dir, split="gone").endswith("/Main/gone.txt nor gone is a file")


def spoilt_box(old, new):
    return xml_of(objects=[CAT]).replace(old, new)


REFUSED = [
    ("<annotation><object>\n<name></annotation>", "a.xml is not valid xml: mismatched tag: line 2"),
    ("<html></html>", "a.xml is not valid xml: an annotation of Pascal VOC does not begin with <html>"),
    ('<?xml version="1.0" encoding="klingon"?><annotation/>', "a.xml is not valid xml: "),
    (WITH_DOCTYPE, "a.xml is not valid xml: declares a document type (annotation)"),
    (xml_of(size=(21, WIDTH)), "image whose size differs from the annotations: image 'a.png' ("),
    (spoilt_box("bndbox>", "box>"), "object 1 'cat' has xmin, ymin, xmax, ymax = '', '', '', ''"),
    (spoilt_box(">12<", ">twelve<"), "= '3', '4', '10', 'twelve'"),
    (spoilt_box(">12<", ">nan<"), "= '3', '4', '10', 'nan'"),
    (spoilt_box(">12<", ">inf<"), "= '3', '4', '10', 'inf'"),
    (spoilt_box(">12<", ">2<"), "object 1 'cat' has xmin, ymin, xmax, ymax = '3', '4', '10', '2'"),
    (spoilt_box(">10<", ">1<"), "object 1 'cat' has xmin, ymin, xmax, ymax = '3', '4', '1', '12'"),
    (spoilt_box("<name>cat</name>", ""), "a.xml object 1 '' is not one of"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_invalid_xml_is_reported_with_file_and_reason(voc_dir, text, message):
    write(voc_dir, "a", text)
    assert message in faults(voc_dir)


def test_all_errors_are_listed_in_one_message(voc_dir):
    write(voc_dir, "a", xml_of(objects=[("cat", 9, 4, 3, 12, 0), ("dog", 1, 2, "x", 4, 0)]))
    write(voc_dir, "c", "<annotation>")
    write(voc_dir, "z", xml_of("b.png", objects=[CAT]))
    put(voc_dir, "JPEGImages/b.png", b"")
    message = faults(voc_dir)
    for expected in (
        "a.xml object 2 'dog' has xmin, ymin, xmax, ymax = '1', '2', 'x', '4'",
        "c.xml is not valid xml: no element found: line 1",
        f"z.xml: its image 'b.png' already belongs to {voc_dir}/Annotations/b.xml",
        "'b.png' (",
    ):
        assert expected in message, message


def test_unreadable_images_are_skipped_with_on_bad_image_skip(voc_dir):
    (voc_dir / "JPEGImages" / "a.png").unlink()
    assert "a.xml: no image 'a' in " in faults(voc_dir)
    annotations, _ = read_voc(voc_dir, policy=SKIP)
    assert annotations.file_names == ["b.png"] and annotations.issues["image-missing"].skipped
    put(voc_dir, "JPEGImages/b.png", b"no image")
    assert "no usable image" in faults(voc_dir, policy=SKIP)
