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
        about = f"<name>{name}</name><difficult>{difficult}</difficult>"
        lines.append(f"<object>\n{about}<bndbox>{box}</bndbox></object>")
    return "\n".join([*lines, "</annotation>"])


def write(directory, stem, text):
    put(directory, f"Annotations/{stem}.xml", text)


@pytest.fixture
def made(tmp_path):
    for stem, name in (("a", "cat"), ("b", "dog")):
        put(tmp_path, f"JPEGImages/{stem}.png", picture())
        write(tmp_path, stem, xml_of(f"{stem}.png", objects=[(name, *CAT[1:])]))
    put(tmp_path, "ImageSets/Main/one.txt", "b\n")
    return tmp_path


read_voc, refused, faults = calls(voc.read_voc)


def test_overlaps_are_those_of_the_devkit(made):
    """In the devkit's VOCevaldet.m, a side has max - min + 1 pixels."""
    boxes = np.random.default_rng(3).integers(1, 20, (12, 2, 2))
    boxes = np.sort(boxes, axis=1).reshape(12, 4)
    write(made, "a", xml_of(objects=[("cat", *box, 0) for box in boxes.tolist()]))
    found, _ = read_voc(made)
    ours = found.boxes_ltwh_px[found.box_image == 0]
    first, last = np.maximum(boxes[:, None, :2], boxes[:, :2]), np.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = np.prod(np.maximum(last - first + 1, 0), axis=2)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    expected = shared / (areas[:, None] + areas - shared)
    np.testing.assert_allclose(mask.iou(ours, ours, [0] * len(ours)), expected, atol=1e-12)


def test_ids_of_classes_are_alphabetic_and_the_same_in_every_split(made):
    write(made, "a", xml_of(objects=[("zebra", 1, 1, 5, 5, 0), ("an ape", 2, 2, 2, 2, 0)]))
    everything, _ = read_voc(made)
    one, _ = read_voc(made, split="one")
    assert everything.label_map == one.label_map == LabelMap((1, 2, 3), ("an ape", "dog", "zebra"))
    assert everything.category_ids.tolist() == [3, 1, 2]
    assert (one.file_names, one.category_ids.tolist()) == (["b.png"], [2])


def test_a_label_map_fixes_ids_and_refuses_other_names(made):
    LabelMap((5, 9), ("dog", "cat")).save(made / "both")
    assert read_voc(made, label_map_file=made / "both")[0].category_ids.tolist() == [9, 5]
    LabelMap((5,), ("dog",)).save(made / "dog")
    assert "a.xml object 1 'cat' is not one of 1 categories" in faults(made, label_map_file=made / "dog")
    write(made, "a", "<annotation>")
    assert read_voc(made, split="one", label_map_file=made / "dog")[0].file_names == ["b.png"]
    assert "a.xml is not valid xml: no element found: line 1" in faults(made, split="one")


@pytest.mark.parametrize(("difficult", "boxes", "crowds"), [("keep", 2, 0), ("crowd", 2, 1), ("drop", 1, 0)])
def test_difficult_objects(made, difficult, boxes, crowds):
    write(made, "a", xml_of(objects=[(*CAT[:5], 1)]))
    found, _ = read_voc(made, difficult=difficult)
    assert (found.num_boxes, int(found.is_crowd.sum())) == (boxes, crowds)
    assert found.label_map.names == ("cat", "dog")  # the label map keeps "cat" even if all cats are left out
    assert found.issues["difficult"].offenders == [f"{made}/Annotations/a.xml object 1 'cat': {difficult}"]


def test_parts_other_keys_and_surrounding_blanks_are_left_out(made):
    box = "<bndbox><xmin>4</xmin><ymin>4</ymin><xmax>6</xmax><ymax>6</ymax></bndbox>"
    part = f"<part><name>head</name>{box}</part>"
    text = xml_of(objects=[(" traffic light\n", " 3.25 ", 4.5, 10.75, "\n12.0", 0)])
    text = text.replace("</bndbox>", f"</bndbox>{part}{part}<actions><jumping>1</jumping></actions>")
    write(made, "a", text.replace("<bndbox>", "<pose>Left</pose><bndbox>", 1))
    found, _ = read_voc(made)
    assert found.label_map.names == ("dog", "traffic light")
    assert found.boxes_ltwh_px.tolist() == [[2.25, 3.5, 8.5, 8.5], [2, 3, 8, 9]]


FILE_NAMES = [
    *(("a.png", name) for name in ("a.png", "a", "", "C:\\data\\gone.jpg", "/tmp/../gone.jpg", "b.png")),
    *(("photo.v2.png", name) for name in ("photo.v2.png", "..\\x\\photo.v2.png")),
]


@pytest.mark.parametrize(("image", "filename"), FILE_NAMES)
def test_the_filename_counts_only_where_no_image_has_the_name_of_the_xml(made, image, filename):
    (made / "JPEGImages" / "a.png").rename(made / "JPEGImages" / image)
    write(made, "a", xml_of(filename, objects=[CAT]))
    assert read_voc(made)[0].file_names == [image, "b.png"]


def test_of_images_that_differ_in_their_suffix_the_filename_chooses(made):
    shutil.copy(made / "JPEGImages" / "a.png", made / "JPEGImages" / "a.jpg")
    assert read_voc(made)[0].file_names == ["a.png", "b.png"]
    write(made, "a", xml_of("gone.png", objects=[CAT]))
    assert "a.xml: several images are called 'a': name one in <filename>" in faults(made)


@pytest.mark.parametrize("size", [None, (0, 0), (0, 40), ("", ""), (20.0, 40), ("tall", 40)])
def test_a_missing_size_is_that_of_the_header(made, size):
    write(made, "a", xml_of(size=size, objects=[CAT]))
    assert read_voc(made)[0].image_sizes.tolist() == [[20, 40], [20, 40]]


def test_coordinates_from_0_are_told(made):
    write(made, "a", xml_of(objects=[("cat", 0, 4, 10, 12, 0)]))
    offenders = read_voc(made)[0].issues["voc-zero"].offenders
    assert offenders == [f"{made}/Annotations/a.xml object 1 'cat' begins at 0, 4"]
    write(made, "a", xml_of(objects=[("cat", -2, 4, 10, 12, 0)]))
    assert not read_voc(made, voc_pixels="zero_based")[0].issues["voc-zero"].count


def test_lists_of_names(made):
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        shutil.copy(made / folder / f"a.{suffix}", made / folder / f"a 1.{suffix}")
    for text, names in (
        ("b -1\n\na  1\n", ["b.png", "a.png"]),  # VOC's list of a class: names with flags
        ("a.jpg\r\n", ["a.png"]),
        ("a 1\n", ["a 1.png"]),
        ("a\nb\na\n", ["a.png", "b.png"]),
    ):
        put(made, "mine.txt", text)
        assert read_voc(made, split=made / "mine.txt")[0].file_names == names
    put(made, "mine.txt", "a\nmissing 1\nb\na\n")
    assert "mine.txt line 2: 'missing 1' does not exist" in faults(made, split=made / "mine.txt")
    assert refused(made, split="gone").endswith("/Main/gone.txt nor gone is a file")


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
def test_what_is_refused(made, text, message):
    write(made, "a", text)
    assert message in faults(made)


def test_everything_is_listed_at_once(made):
    write(made, "a", xml_of(objects=[("cat", 9, 4, 3, 12, 0), ("dog", 1, 2, "x", 4, 0)]))
    write(made, "c", "<annotation>")
    write(made, "z", xml_of("b.png", objects=[CAT]))
    put(made, "JPEGImages/b.png", b"")
    message = faults(made)
    for expected in (
        "a.xml object 2 'dog' has xmin, ymin, xmax, ymax = '1', '2', 'x', '4'",
        "c.xml is not valid xml: no element found: line 1",
        f"z.xml: its image 'b.png' already belongs to {made}/Annotations/b.xml",
        "'b.png' (",
    ):
        assert expected in message, message


def test_images_that_cannot_be_read_are_left_out_on_demand(made):
    (made / "JPEGImages" / "a.png").unlink()
    assert "a.xml: no image 'a' in " in faults(made)
    found, _ = read_voc(made, policy=SKIP)
    assert found.file_names == ["b.png"] and found.issues["image-missing"].skipped
    put(made, "JPEGImages/b.png", b"no image")
    assert "no usable image" in faults(made, policy=SKIP)
