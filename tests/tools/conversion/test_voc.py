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


def test_voc_xml_files_beside_their_images_need_no_directory_of_images(tmp_path):
    write_file(tmp_path, "a.jpg", black_image())
    write_file(tmp_path, "a.xml", xml_of("a.jpg", objects=[CAT]))
    annotations, images_dir = read_voc(tmp_path)
    assert (annotations.file_names, str(images_dir)) == (["a.jpg"], str(tmp_path))
    (tmp_path / "a.jpg").unlink()
    assert "JPEGImages is not a directory: give the images' directory as --images=DIR" in user_error(tmp_path)
    assert user_error(tmp_path / "b") == f"--input={tmp_path}/b is not a directory"


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


def cvat_xml(*boxes):
    """As CVAT writes it through datumaro. Each box is (xmin, ymin, xmax, ymax, rotation), all texts."""
    objects = [
        "<object><name>cat</name><truncated>0</truncated><occluded>0</occluded><difficult>0</difficult>"
        f"<bndbox><xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax></bndbox>"
        "<attributes><attribute><name>id</name><value>7</value></attribute>"
        f"<attribute><name>rotation</name><value>{rotation}</value></attribute></attributes></object>"
        for xmin, ymin, xmax, ymax, rotation in boxes
    ]
    return f"<annotation><filename>a.png</filename>{''.join(objects)}</annotation>"


def test_rotated_rectangle_of_cvat_becomes_the_upright_box_around_it(voc_dir):
    """A square of 10 pixels that is rotated by 45 degrees has the diagonal 14.142136 as both sides."""
    write_xml(
        voc_dir,
        "a",
        cvat_xml(
            ("12.0", "8.0", "28.0", "12.0", "90.0"),
            ("15.0", "5.0", "25.0", "15.0", "45.0"),
            ("15.0", "5.0", "25.0", "7.0", "180.0"),
            ("15.0", "5.0", "25.0", "8.0", "0.0"),
        ),
    )
    annotations, _ = read_voc(voc_dir, voc_pixels="zero_based")
    boxes = [[18, 2, 4, 16], [12.928932, 2.928932, 14.142136, 14.142136], [15, 5, 10, 2], [15, 5, 10, 3]]
    assert annotations.boxes_ltwh_px[annotations.box_image == 0].tolist() == boxes
    offenders = annotations.issues["box-rotated"].offenders
    assert len(offenders) == 3
    assert offenders[0] == f"{voc_dir}/Annotations/a.xml object 1 'cat' by 90 degrees"


@pytest.mark.parametrize("rotation", ["left", "nan"])
def test_rotation_that_is_not_a_number_is_an_error(voc_dir, rotation):
    write_xml(voc_dir, "a", cvat_xml(("1", "2", "3", "4", rotation)))
    assert "object 1 'cat' has a rotation that is not a number" in data_error(voc_dir)


# --- encodings ---

ENCODINGS = {
    "GBK": "GBK",
    "gb2312": "gb18030",  # Chinese Windows writes characters that GB 2312 lacks
    "Big5": "big5",
    "shift_jis": "cp932",
    "EUC-KR": "cp949",
    "iso-8859-1": "latin-1",
    "utf-16": "utf-16",
    "UTF-16": "utf-8",  # .NET writes the encoding of its texts in memory
}


@pytest.mark.parametrize(("declared", "actual"), ENCODINGS.items())
def test_voc_xml_in_an_encoding_of_python_is_read(voc_dir, declared, actual):
    name = {"cp932": "猫①", "cp949": "고양이똠", "latin-1": "Kätzchen", "big5": "貓"}.get(actual, "猫\u9555")
    text = f'<?xml version="1.0" encoding="{declared}"?>\n{xml_of(objects=[(name, *CAT[1:])])}'
    write_file(voc_dir, "Annotations/a.xml", text.encode(actual))
    assert read_voc(voc_dir)[0].label_map.names == tuple(sorted(("dog", name)))


@pytest.mark.parametrize("declaration", ["", '<?xml version="1.0" encoding="utf-8"?>'])
def test_voc_xml_in_another_encoding_than_it_declares_is_refused_with_what_to_do(voc_dir, declaration):
    text = declaration + xml_of(objects=[("汽车", *CAT[1:])])
    write_file(voc_dir, "Annotations/a.xml", text.encode("gbk"))
    message = data_error(voc_dir)
    assert "a.xml is not valid xml: it is not in the encoding utf-8: save it as UTF-8" in message


# --- images and splits ---


def nested(directory):
    """a.png and a.xml in the folder cam1 as datumaro writes them, b.png and b.XML in no folder."""
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        (directory / folder / "cam1").mkdir()
        (directory / folder / f"a.{suffix}").rename(directory / folder / "cam1" / f"a.{suffix}")
    (directory / "Annotations" / "b.xml").rename(directory / "Annotations" / "b.XML")


def test_voc_xml_files_in_folders_and_with_their_suffix_in_capitals_are_read(voc_dir):
    nested(voc_dir)
    annotations, _ = read_voc(voc_dir)
    assert annotations.file_names == ["b.png", "cam1/a.png"] and annotations.num_boxes == 2
    write_file(voc_dir, "mine.txt", "cam1/a\n")
    assert read_voc(voc_dir, split=voc_dir / "mine.txt")[0].file_names == ["cam1/a.png"]


@pytest.mark.parametrize(
    ("image", "filename"),
    [("cam1/a.png", "gone.png"), ("x/y/photo.png", "photo.png"), ("x/1.png", "x\\1.png")],
)
def test_voc_image_in_a_folder_belongs_to_an_xml_file_outside_if_no_nearer_xml_has_its_name(
    voc_dir, image, filename
):
    write_file(voc_dir, f"JPEGImages/{image}", black_image())
    (voc_dir / "JPEGImages" / "a.png").unlink()
    write_xml(voc_dir, "a", xml_of(filename, objects=[CAT]))
    assert sorted(read_voc(voc_dir)[0].file_names) == sorted(["b.png", image])


def test_voc_image_with_an_xml_file_of_its_name_belongs_to_no_other_xml_file(voc_dir):
    nested(voc_dir)
    write_xml(voc_dir, "cam2/a", xml_of("cam2/a.png", objects=[CAT]))
    assert "cam2/a.xml: no image 'cam2/a' in " in data_error(voc_dir)
    assert read_voc(voc_dir, policy=SKIP)[0].file_names == ["b.png", "cam1/a.png"]


def test_two_voc_xml_files_of_one_name_are_an_error(voc_dir):
    shutil.copy(voc_dir / "Annotations" / "a.xml", voc_dir / "Annotations" / "a.XML")
    assert "a.xml is a second file for 'a', beside " in data_error(voc_dir)


def test_hidden_files_and_system_folders_of_voc_data_are_skipped_and_counted(voc_dir):
    hidden = [f"Annotations/{name}" for name in (".ipynb_checkpoints/a.xml", "._a.xml", "@eaDir/b.xml")]
    hidden += [f"JPEGImages/{name}" for name in ("._a.png", ".thumbnails/a.jpg", "@eaDir/a.jpg", "Thumbs.db")]
    for name in hidden:
        write_file(voc_dir, name, b"no xml")
    annotations, _ = read_voc(voc_dir)
    assert annotations.file_names == ["a.png", "b.png"]
    assert annotations.issues["file-hidden"].count == len(hidden)


def test_voc_images_without_an_xml_file_and_in_other_formats_are_named(voc_dir):
    for name in ("cam1/c.jpg", "d.HEIC"):
        write_file(voc_dir, f"JPEGImages/{name}", b"image")
    issues = read_voc(voc_dir)[0].issues
    assert issues["image-unlabelled"].offenders == ["'cam1/c.jpg'"]
    assert issues["format-skipped"].offenders == ["'d.HEIC'"]
    assert not read_voc(voc_dir, split="one")[0].issues["image-unlabelled"].count


def test_voc_image_in_a_format_that_is_not_read_is_an_error_if_it_has_an_xml_file(voc_dir):
    black_image().save(voc_dir / "JPEGImages" / "a.gif")
    (voc_dir / "JPEGImages" / "a.png").unlink()
    for filename in ("a.gif", "gone.jpg"):
        write_xml(voc_dir, "a", xml_of(filename, objects=[CAT]))
        assert "image format that DALI does not decode: image 'a.gif' (" in data_error(voc_dir)


def test_missing_voc_image_whose_name_differs_in_case_from_a_file_is_reported_with_the_file(voc_dir):
    (voc_dir / "JPEGImages" / "a.png").rename(voc_dir / "JPEGImages" / "A.png")
    message = data_error(voc_dir)
    expected = "JPEGImages, but 'A.png' exists, in other upper and lower case: rename one of the two. "
    assert f"no image 'a' in {voc_dir}/{expected}" in message


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


def test_voc_boxes_outside_an_object_are_errors(voc_dir):
    text = xml_of(objects=[CAT, CAT]).replace("object>", "Object>", 2)
    write_xml(voc_dir, "a", text)
    assert "a.xml has 1 <bndbox> outside an <object>" in data_error(voc_dir)


def test_voc_image_without_objects_is_reported(voc_dir):
    write_xml(voc_dir, "a", xml_of())
    issue = read_voc(voc_dir)[0].issues["image-without-boxes"]
    assert issue.count == 1 and "a.xml" in issue.line()
