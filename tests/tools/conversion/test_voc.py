import shutil

import numpy as np
import pytest
from pycocotools import mask

from common.data.labels import LabelMap
from tests.tools.conversion.labelled_images import SKIP, black_image, read_functions, write_file
from tools.conversion import voc

CAT = ("cat", 3, 4, 10, 12, 0)

read_voc, user_error, data_error = read_functions(voc.read_voc)


def xml_of(filename="a.png", size=(20, 40), objects=()):
    """`size` is (height, width). Each object is (name, xmin, ymin, xmax, ymax, difficult)."""
    lines = ["<annotation>", f"<filename>{filename}</filename>"]
    if size is not None:
        lines.append(f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>")
    for name, xmin, ymin, xmax, ymax, difficult in objects:
        box = f"<xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax>"
        attributes = f"<name>{name}</name><difficult>{difficult}</difficult>"
        lines.append(f"<object>\n{attributes}<bndbox>{box}</bndbox></object>")
    return "\n".join([*lines, "</annotation>"])


def write_xml(directory, stem, text):
    write_file(directory, f"Annotations/{stem}.xml", text)


@pytest.fixture
def voc_dir(tmp_path):
    """a.png with a cat, b.png with a dog, and the list `one` with b."""
    for stem, name in (("a", "cat"), ("b", "dog")):
        write_file(tmp_path, f"JPEGImages/{stem}.png", black_image())
        write_xml(tmp_path, stem, xml_of(f"{stem}.png", objects=[(name, *CAT[1:])]))
    write_file(tmp_path, "ImageSets/Main/one.txt", "b\n")
    return tmp_path


# --- boxes and classes ---


def test_voc_boxes_have_the_ious_of_the_voc_devkit(voc_dir):
    """In the devkit's VOCevaldet.m, a side has max - min + 1 pixels."""
    boxes = np.random.default_rng(3).integers(1, 20, (12, 2, 2))
    boxes = np.sort(boxes, axis=1).reshape(12, 4)
    write_xml(voc_dir, "a", xml_of(objects=[("cat", *box, 0) for box in boxes.tolist()]))
    annotations, _ = read_voc(voc_dir)
    boxes_ltwh = annotations.boxes_ltwh_px[annotations.box_image == 0]
    first, last = np.maximum(boxes[:, None, :2], boxes[:, :2]), np.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = np.prod(np.maximum(last - first + 1, 0), axis=2)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    expected = shared / (areas[:, None] + areas - shared)
    np.testing.assert_allclose(mask.iou(boxes_ltwh, boxes_ltwh, [0] * 12), expected, atol=1e-12)


def test_voc_category_ids_are_alphabetic_and_equal_in_every_split(voc_dir):
    write_xml(voc_dir, "a", xml_of(objects=[("zebra", 1, 1, 5, 5, 0), ("an ape", 2, 2, 2, 2, 0)]))
    all_images, _ = read_voc(voc_dir)
    subset, _ = read_voc(voc_dir, split="one")
    assert all_images.label_map == subset.label_map == LabelMap((1, 2, 3), ("an ape", "dog", "zebra"))
    assert all_images.category_ids.tolist() == [3, 1, 2]
    assert (subset.file_names, subset.category_ids.tolist()) == (["b.png"], [2])


def test_label_map_file_gives_voc_category_ids_and_a_class_that_it_lacks_is_an_error(voc_dir):
    LabelMap((5, 9), ("dog", "cat")).save(voc_dir / "both")
    assert read_voc(voc_dir, label_map_file=voc_dir / "both")[0].category_ids.tolist() == [9, 5]
    LabelMap((5,), ("dog",)).save(voc_dir / "dog")
    message = data_error(voc_dir, label_map_file=voc_dir / "dog")
    assert "a.xml object 1 'cat' is not one of 1 categories" in message


def test_invalid_voc_xml_outside_the_split_is_an_error_only_without_a_label_map(voc_dir):
    write_xml(voc_dir, "a", "<annotation>")
    assert "a.xml is not valid xml: no element found: line 1" in data_error(voc_dir, split="one")
    LabelMap((5,), ("dog",)).save(voc_dir / "dog")
    assert read_voc(voc_dir, split="one", label_map_file=voc_dir / "dog")[0].file_names == ["b.png"]


@pytest.mark.parametrize(("difficult", "boxes", "crowds"), [("keep", 2, 0), ("crowd", 2, 1), ("drop", 1, 0)])
def test_difficult_object_is_a_box_a_crowd_or_dropped_as_the_flag_says(voc_dir, difficult, boxes, crowds):
    write_xml(voc_dir, "a", xml_of(objects=[(*CAT[:5], 1)]))
    annotations, _ = read_voc(voc_dir, difficult=difficult)
    assert (annotations.num_boxes, int(annotations.is_crowd.sum())) == (boxes, crowds)
    assert annotations.label_map.names == ("cat", "dog")  # also if all cats are dropped
    location = f"{voc_dir}/Annotations/a.xml object 1 'cat'"
    assert annotations.issues["difficult"].offenders == [f"{location}: {difficult}"]


def test_voc_part_and_unknown_xml_elements_are_ignored_and_blanks_are_stripped(voc_dir):
    box = "<bndbox><xmin>4</xmin><ymin>4</ymin><xmax>6</xmax><ymax>6</ymax></bndbox>"
    part = f"<part><name>head</name>{box}</part>"
    text = xml_of(objects=[(" traffic light\n", " 3.25 ", 4.5, 10.75, "\n12.0", 0)])
    text = text.replace("</bndbox>", f"</bndbox>{part}{part}<actions><jumping>1</jumping></actions>")
    write_xml(voc_dir, "a", text.replace("<bndbox>", "<pose>Left</pose><bndbox>", 1))
    annotations, _ = read_voc(voc_dir)
    assert annotations.label_map.names == ("dog", "traffic light")
    assert annotations.boxes_ltwh_px.tolist() == [[2.25, 3.5, 8.5, 8.5], [2, 3, 8, 9]]


def test_voc_box_that_begins_at_zero_gives_a_warning_unless_zero_based(voc_dir):
    write_xml(voc_dir, "a", xml_of(objects=[("cat", 0, 4, 10, 12, 0)]))
    offenders = read_voc(voc_dir)[0].issues["voc-zero"].offenders
    assert offenders == [f"{voc_dir}/Annotations/a.xml object 1 'cat' begins at 0, 4"]
    write_xml(voc_dir, "a", xml_of(objects=[("cat", -2, 4, 10, 12, 0)]))
    assert not read_voc(voc_dir, voc_pixels="zero_based")[0].issues["voc-zero"].count


# --- images and splits ---

FILE_NAMES = [
    *(("a.png", name) for name in ("a.png", "", "C:\\data\\gone.jpg", "/tmp/../gone.jpg", "b.png")),
    *(("photo.v2.png", name) for name in ("photo.v2.png", "..\\x\\photo.v2.png")),
]


@pytest.mark.parametrize(("image", "filename"), FILE_NAMES)
def test_voc_filename_element_is_used_only_if_no_image_has_the_name_of_the_xml(voc_dir, image, filename):
    (voc_dir / "JPEGImages" / "a.png").rename(voc_dir / "JPEGImages" / image)
    write_xml(voc_dir, "a", xml_of(filename, objects=[CAT]))
    assert read_voc(voc_dir)[0].file_names == [image, "b.png"]


def test_voc_filename_element_selects_among_images_that_differ_only_in_their_suffix(voc_dir):
    shutil.copy(voc_dir / "JPEGImages" / "a.png", voc_dir / "JPEGImages" / "a.jpg")
    assert read_voc(voc_dir)[0].file_names == ["a.png", "b.png"]
    write_xml(voc_dir, "a", xml_of("gone.png", objects=[CAT]))
    assert "a.xml: several images are called 'a': name one in <filename>" in data_error(voc_dir)


@pytest.mark.parametrize("size", [None, (0, 40), (20.0, 40), ("tall", 40)], ids=str)
def test_image_header_replaces_a_missing_or_invalid_voc_size_element(voc_dir, size):
    write_xml(voc_dir, "a", xml_of(size=size, objects=[CAT]))
    assert read_voc(voc_dir)[0].image_sizes.tolist() == [[20, 40], [20, 40]]


SPLITS = {
    "names with the flags of a class": ("b -1\n\na  1\n", ["b.png", "a.png"]),
    "file name": ("a.jpg\r\n", ["a.png"]),
    "name that ends like a flag": ("a 1\n", ["a 1.png"]),
    "repeated name": ("a\nb\na\n", ["a.png", "b.png"]),
}


@pytest.mark.parametrize(("text", "names"), SPLITS.values(), ids=SPLITS)
def test_voc_split_list_selects_the_images_that_it_names(voc_dir, text, names):
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        if "a 1.png" in names:
            shutil.copy(voc_dir / folder / f"a.{suffix}", voc_dir / folder / f"a 1.{suffix}")
    write_file(voc_dir, "mine.txt", text)
    assert read_voc(voc_dir, split=voc_dir / "mine.txt")[0].file_names == names


def test_missing_voc_split_list_and_unknown_name_in_a_list_are_errors(voc_dir):
    write_file(voc_dir, "mine.txt", "a\nmissing 1\nb\na\n")
    message = data_error(voc_dir, split=voc_dir / "mine.txt")
    assert "mine.txt line 2: 'missing 1' does not exist" in message
    assert user_error(voc_dir, split="gone").endswith("/Main/gone.txt nor gone is a file")


# --- errors ---

CAT_XML = xml_of(objects=[CAT])
ENTITY = '<!DOCTYPE annotation [<!ENTITY x SYSTEM "/etc/passwd">]><annotation>&x;</annotation>'
INVALID = {
    "broken xml": ("<annotation>\n<name></annotation>", "a.xml is not valid xml: mismatched tag: line 2"),
    "html": ("<html/>", "is not valid xml: an annotation of Pascal VOC does not begin with <html>"),
    "unknown encoding": ('<?xml version="1.0" encoding="klingon"?><annotation/>', "is not valid xml: "),
    "document type": (ENTITY, "is not valid xml: declares a document type (annotation)"),
    "another size": (
        xml_of(size=(21, 40)),
        "whose size differs from the annotations: image 'a.png'",
    ),
    "no box": (CAT_XML.replace("bndbox>", "box>"), "object 1 'cat' has xmin, ymin, xmax, ymax = '', '', "),
    "word": (CAT_XML.replace(">12<", ">twelve<"), "= '3', '4', '10', 'twelve'"),
    "nan": (CAT_XML.replace(">12<", ">nan<"), "= '3', '4', '10', 'nan'"),
    "inf": (CAT_XML.replace(">12<", ">inf<"), "= '3', '4', '10', 'inf'"),
    "ymax below ymin": (CAT_XML.replace(">12<", ">2<"), "= '3', '4', '10', '2'"),
    "xmax below xmin": (CAT_XML.replace(">10<", ">1<"), "= '3', '4', '1', '12'"),
    "no name": (CAT_XML.replace("<name>cat</name>", ""), "a.xml object 1 '' is not one of"),
}


@pytest.mark.parametrize(("text", "message"), INVALID.values(), ids=INVALID)
def test_invalid_xml_is_reported_with_file_and_reason(voc_dir, text, message):
    write_xml(voc_dir, "a", text)
    assert message in data_error(voc_dir)


def test_errors_of_all_voc_files_are_in_one_message(voc_dir):
    write_xml(voc_dir, "a", xml_of(objects=[("cat", 9, 4, 3, 12, 0), ("dog", 1, 2, "x", 4, 0)]))
    write_xml(voc_dir, "c", "<annotation>")
    write_xml(voc_dir, "z", xml_of("b.png", objects=[CAT]))
    write_file(voc_dir, "JPEGImages/b.png", b"")
    message = data_error(voc_dir)
    for expected in (
        "a.xml object 2 'dog' has xmin, ymin, xmax, ymax = '1', '2', 'x', '4'",
        "c.xml is not valid xml: no element found: line 1",
        f"z.xml: its image 'b.png' already belongs to {voc_dir}/Annotations/b.xml",
        "'b.png' (",
    ):
        assert expected in message, message


def test_missing_or_damaged_voc_image_is_an_error_or_skipped(voc_dir):
    (voc_dir / "JPEGImages" / "a.png").unlink()
    assert "a.xml: no image 'a' in " in data_error(voc_dir)
    annotations, _ = read_voc(voc_dir, policy=SKIP)
    assert annotations.file_names == ["b.png"] and annotations.issues["image-missing"].skipped
    write_file(voc_dir, "JPEGImages/b.png", b"no image")
    assert "no usable image" in data_error(voc_dir, policy=SKIP)
