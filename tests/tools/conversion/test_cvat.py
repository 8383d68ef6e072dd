import math

import numpy as np
import pytest

from common.data.labels import LabelMap
from tests.tools.conversion.exports import CVAT_BOX, cvat_xml, write_cvat
from tests.tools.conversion.labelled_images import black_image, read_functions, write_file
from tools.conversion import cvat

read_cvat, user_error, data_error = read_functions(cvat.read_cvat)


@pytest.fixture
def xml(tmp_path):
    return write_cvat(tmp_path)


def write_shapes(xml, first, second="", **options):
    """Replaces the shapes of a.png and b.png."""
    xml.write_text(cvat_xml([first, second], **options))


def test_cvat_boxes_are_edges_from_zero_and_categories_have_the_order_of_meta(xml):
    annotations, images_dir = read_cvat(xml)
    assert annotations.boxes_ltwh_px.tolist() == [[3, 4, 7, 8], [0, 5, 20, 10]]
    assert annotations.label_map == LabelMap((1, 2), ("dog", "cat"))
    assert annotations.category_ids.tolist() == [2, 1]
    assert images_dir == str(xml.parent / "images") and annotations.file_names == ["a.png", "b.png"]
    assert not [issue.kind for issue in annotations.issues]
    assert read_cvat(xml.parent)[0].fingerprint() == annotations.fingerprint()


def test_rotated_box_of_cvat_becomes_the_box_around_it_and_is_reported(xml):
    """[20, 25, 60, 10] turned by 90 degrees is [45, 0, 10, 60]."""
    box = CVAT_BOX.format("cat", 20, 25, 80, 35).replace(" z_order", ' rotation="90.00" z_order')
    for name in ("a.png", "b.png"):
        black_image().resize((100, 60)).save(xml.parent / "images" / name)
    write_shapes(xml, box, size=(60, 100))
    annotations, _ = read_cvat(xml)
    assert annotations.boxes_ltwh_px.tolist() == [[45, 0, 10, 60]]
    assert annotations.issues["box-rotated"].offenders == [
        f"{xml} image 0 'a.png' box 1 'cat' by 90.00 degrees"
    ]


def corners_of(x1, y1, x2, y2, degrees):
    """The corners of a box after a rotation about its centre, by complex numbers."""
    centre = complex(x1 + x2, y1 + y2) / 2
    turn = complex(math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))
    points = [complex(x, y) for x in (x1, x2) for y in (y1, y2)]
    return np.array([[z.real, z.imag] for z in [(point - centre) * turn + centre for point in points]])


@pytest.mark.parametrize("degrees", [30, 100, 200, 359])
def test_box_around_a_rotated_box_touches_all_its_corners(xml, degrees):
    box = CVAT_BOX.format("cat", 10, 6, 22, 12).replace(" z_order", f' rotation="{degrees}.00" z_order')
    write_shapes(xml, box)
    corners = corners_of(10, 6, 22, 12, degrees)
    expected = [*corners.min(axis=0), *np.ptp(corners, axis=0)]
    np.testing.assert_allclose(read_cvat(xml)[0].boxes_ltwh_px[0], expected, atol=1e-5)


HEAD = 'label="cat" source="manual" occluded="0"'
CUBOID = {
    f"x{side}{face}": 4 + face + 6 * ("r" in side) for face in (1, 2) for side in ("tl", "bl", "tr", "br")
}
CUBOID |= {
    f"y{side}{face}": 5 + face + 3 * ("b" in side) for face in (1, 2) for side in ("tl", "bl", "tr", "br")
}
SHAPES = {
    "polygon": (f'<polygon {HEAD} points="3.00,4.00;10.00,6.50;5.25,12.00" z_order="0">', [3, 4, 7, 8]),
    "mask": (f'<mask {HEAD} rle="3, 5, 6" left="3" top="4" width="7" height="2" z_order="0">', [3, 4, 7, 2]),
    "ellipse": (f'<ellipse {HEAD} cx="20.00" cy="10.00" rx="8.00" ry="4.00" z_order="0">', [12, 6, 16, 8]),
    "turned ellipse": (
        f'<ellipse {HEAD} cx="20.00" cy="10.00" rx="8.00" ry="4.00" rotation="90.00" z_order="0">',
        [16, 2, 8, 16],
    ),
    "cuboid": (
        f"<cuboid {HEAD} "
        + " ".join(f'{key}="{value}.00"' for key, value in CUBOID.items())
        + ' z_order="0">',
        [5, 6, 7, 4],
    ),
}


@pytest.mark.parametrize(("element", "box"), SHAPES.values(), ids=SHAPES)
def test_cvat_shape_with_an_area_becomes_the_box_around_it(xml, element, box):
    tag = element[1:].split()[0]
    write_shapes(xml, f"{element}</{tag}>")
    annotations, _ = read_cvat(xml)
    assert annotations.boxes_ltwh_px.tolist() == [box]
    kinds = {"mask": [], "turned ellipse": ["box-rotated"]}
    kinds = kinds.get("turned ellipse" if "rotation" in element else tag, ["polygon"])
    assert [issue.kind for issue in annotations.issues] == ["image-without-boxes", *kinds]


def test_cvat_points_polylines_skeletons_and_tags_are_left_out_and_reported(xml):
    others = f'<points {HEAD} points="1.00,2.00" z_order="0"></points>'
    others += f'<polyline {HEAD} points="1.00,2.00;3.00,4.00" z_order="0"></polyline>'
    others += (
        f'<skeleton label="cat" source="manual" z_order="0"><points {HEAD} points="1.00,2.00"/></skeleton>'
    )
    others += '<tag label="cat" source="manual"></tag>'
    write_shapes(xml, others, CVAT_BOX.format("dog", 0, 5, 20, 15))
    annotations, _ = read_cvat(xml)
    assert annotations.num_boxes == 1 and annotations.num_images == 2
    assert annotations.issues["shape-without-box"].count == 4


def test_images_of_a_cvat_project_are_read_from_the_folder_of_their_subset(xml):
    images = xml.parent / "images"
    (images / "Train").mkdir()
    (images / "a.png").rename(images / "Train" / "a.png")
    xml.write_text(cvat_xml(attributes=' subset="Train" task_id="7"'))
    assert read_cvat(xml)[0].file_names == ["Train/a.png", "b.png"]


def test_cvat_boxes_of_an_image_with_exif_rotation_are_converted_to_the_stored_pixels(xml):
    """Orientation 6 turns the stored 40 x 20 pixels clockwise: CVAT shows and measures 20 x 40."""
    stored = black_image()
    stored.getexif()[0x0112] = 6
    for name in ("a.png", "b.png"):
        stored.save(xml.parent / "images" / name, exif=stored.getexif())
    write_shapes(xml, CVAT_BOX.format("cat", 0, 10, 10, 20), size=(40, 20))
    annotations, _ = read_cvat(xml)
    assert annotations.boxes_ltwh_px.tolist() == [[10, 10, 10, 10]]
    assert annotations.image_sizes.tolist() == [[20, 40]] * 2
    assert annotations.issues["boxes-turned-back"].count == 2


def test_cvat_image_of_another_size_and_invalid_coordinates_are_errors(xml):
    write_shapes(xml, CVAT_BOX.format("cat", 3, 4, 10, 12).replace("10.00", "ten"), size=(21, 40))
    message = data_error(xml)
    assert "image 'a.png' (" in message and "is 40 x 20 pixels, the annotations have 40 x 21" in message
    assert "image 0 'a.png' box 1 'cat' has no valid coordinates" in message
    write_shapes(xml, CVAT_BOX.format("cat", 10, 4, 3, 12))
    assert "has left, top, right, bottom = [10.0, 4.0, 3.0, 12.0]" in data_error(xml)


def test_two_entries_for_one_image_and_images_without_an_entry_are_reported(xml):
    write_file(xml.parent, "images/cam 2/c.png", black_image())
    write_file(xml.parent, "images/.thumbnails/a.png", black_image())
    assert read_cvat(xml)[0].issues["image-unlabelled"].offenders == ["'cam 2/c.png'"]
    xml.write_text(cvat_xml().replace('name="b.png"', 'name=""'))
    assert f"({xml} image 1)" in data_error(xml)
    xml.write_text(cvat_xml().replace('name="b.png"', 'name="a.png"'))
    message = data_error(xml)
    assert f"image 'a.png' is given 2 times: {xml} image 0, {xml} image 1" in message


def test_cvat_for_video_other_xml_and_missing_images_are_refused(xml):
    track = '<track id="0" label="cat" source="manual"></track></annotations>'
    xml.write_text(cvat_xml(["", ""]).replace("</annotations>", track))
    assert "export the task as 'CVAT for images 1.1'" in user_error(xml)
    xml.write_text("<html/>")
    assert "begins with <html>" in user_error(xml)
    xml.write_text("<annotations>")
    assert "is not valid xml" in user_error(xml)
    assert "give the images' directory" in user_error(xml, images_dir=xml.parent / "gone")


@pytest.mark.parametrize("side", ["", "-20", "9" * 5000])
def test_cvat_image_whose_size_is_not_a_number_of_pixels_is_read(xml, side):
    xml.write_text(cvat_xml(size=(side, 40)))
    assert read_cvat(xml)[0].boxes_ltwh_px.tolist() == [[3, 4, 7, 8], [0, 5, 20, 10]]


def test_two_elements_of_one_image_are_refused(xml):
    text = xml.read_text()
    element = text[text.index("<image ") : text.index("</image>") + len("</image>")]
    xml.write_text(text.replace(element, element * 2, 1))
    assert "image 'a.png'" in data_error(xml) and "two elements have this name and id" in data_error(xml)
