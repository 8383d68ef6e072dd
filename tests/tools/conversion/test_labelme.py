import base64
import io
import json
import pathlib

import PIL.Image
import pytest

from common.data.labels import LabelMap
from tests.refusal import refusal
from tests.tools.conversion.exports import labelme_json, write_labelme, write_voc
from tests.tools.conversion.labelled_images import black_image, options_of, read_functions, write_file
from tools.conversion import labelme
from tools.convert import convert

read_labelme, user_error, data_error = read_functions(labelme.read_labelme)


@pytest.fixture
def data_dir(tmp_path):
    return write_labelme(tmp_path)


def test_labelme_rectangles_have_corners_in_any_order(data_dir):
    annotations, images_dir = read_labelme(data_dir)
    assert annotations.boxes_ltwh_px.tolist() == [[3, 4, 7, 8], [0, 5, 20, 10]]
    assert annotations.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert (images_dir, annotations.file_names) == (str(data_dir), ["a.png", "b.png"])
    assert not [issue.kind for issue in annotations.issues]


def mask_shape():
    """A mask of 7 x 8 pixels, as labelme stores it: its box, and a PNG in base64."""
    png = io.BytesIO()
    PIL.Image.new("1", (7, 8), 1).save(png, "PNG")
    shape = json.loads(labelme_json("a.png", [("cat", "mask", [[3, 4], [9, 11]])]))
    shape["shapes"][0]["mask"] = base64.b64encode(png.getvalue()).decode()
    return json.dumps(shape)


SHAPES = {
    "polygon": ([[3, 4], [10, 6.5], [5.25, 12]], [3, 4, 7, 8], ["polygon"]),
    "circle": ([[10, 10], [13, 14]], [5, 5, 10, 10], ["polygon"]),  # the radius is 5
    "oriented_rectangle": ([[10, 0], [20, 10], [10, 20], [0, 10]], [0, 0, 20, 20], ["box-rotated"]),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_labelme_shape_with_an_area_becomes_the_box_around_it(data_dir, kind):
    points, box, kinds = SHAPES[kind]
    write_file(data_dir, "a.json", labelme_json("a.png", [("cat", kind, points)]))
    annotations, _ = read_labelme(data_dir)
    assert annotations.boxes_ltwh_px[0].tolist() == box
    assert [issue.kind for issue in annotations.issues] == kinds


def test_labelme_mask_has_the_size_of_its_pixels(data_dir):
    write_file(data_dir, "a.json", mask_shape())
    assert read_labelme(data_dir)[0].boxes_ltwh_px[0].tolist() == [3, 4, 7, 8]


def test_labelme_points_and_lines_are_left_out_and_reported(data_dir):
    shapes = [("cat", kind, [[1, 2], [3, 4]]) for kind in ("point", "line", "linestrip", "points")]
    write_file(data_dir, "a.json", labelme_json("a.png", shapes))
    annotations, _ = read_labelme(data_dir)
    assert annotations.num_images == 2 and annotations.num_boxes == 1
    issue = annotations.issues["shape-without-box"]
    assert issue.count == 4 and issue.offenders[0] == f"{data_dir}/a.json shape 1 'cat': point"


IMAGE_PATHS = {
    "path of Windows": ("json", "images", "..\\images\\a.png"),
    "path of another computer": ("json", "images", "/home/me/photos/a.png"),
    "renamed image": ("all", "all", "IMG_0001.JPG"),
}


@pytest.mark.parametrize(("labels", "images", "image_path"), IMAGE_PATHS.values(), ids=IMAGE_PATHS)
def test_labelme_image_is_read_where_image_path_or_the_name_of_the_json_leads(
    tmp_path, labels, images, image_path
):
    write_file(tmp_path, f"{images}/a.png", black_image())
    text = labelme_json(image_path, [("cat", "rectangle", [[3, 4], [10, 12]])])
    write_file(tmp_path, f"{labels}/a.json", text)
    annotations, _ = read_labelme(tmp_path / labels, images_dir=tmp_path / images)
    assert annotations.file_names == ["a.png"]


def test_labelme_boxes_of_an_image_with_exif_rotation_are_converted_to_the_stored_pixels(tmp_path):
    """labelme turns the image before it is labelled. If labels have the stored size, boxes stay."""
    stored = black_image()
    stored.getexif()[0x0112] = 6
    stored.save(tmp_path / "a.jpg", exif=stored.getexif())
    shape = ("cat", "rectangle", [[0, 10], [10, 20]])
    for size, box in (((40, 20), [10, 10, 10, 10]), ((20, 40), [0, 10, 10, 10])):
        write_file(tmp_path, "a.json", labelme_json("a.jpg", [shape], size))
        assert read_labelme(tmp_path)[0].boxes_ltwh_px.tolist() == [box]


def test_other_json_files_are_reported_and_broken_ones_are_errors(data_dir):
    write_file(data_dir, "sub/notes.json", "{}")
    write_file(data_dir, ".hidden/c.json", "{")
    annotations, _ = read_labelme(data_dir)
    assert annotations.issues["not-labels"].offenders == [f"{data_dir}/sub/notes.json has no list `shapes`"]
    write_file(data_dir, "sub/c.json", '{"shapes": [')
    write_file(data_dir, "d.json", labelme_json("d.png", [("cat", "rectangle", [[1, 2]])]))
    write_file(data_dir, "a.json", labelme_json("a.png", [("cat", "polygon", [["x", 2]])]))
    message = data_error(data_dir)
    assert f"{data_dir}/sub/c.json is not valid JSON" in message
    assert "missing image file: image 'd.png'" in message
    assert f"{data_dir}/a.json shape 1 'cat' has no valid label or points" in message


@pytest.mark.parametrize("images", [".", "images"])
def test_hidden_files_of_jsons_and_images_are_each_reported_once(data_dir, images):
    write_file(data_dir, ".notes.json", "{")
    write_file(data_dir, f"{images}/.hidden.png", "")
    for name in ("a.png", "b.png"):
        (data_dir / name).rename(data_dir / images / name)
    annotations, _ = read_labelme(data_dir, images_dir=str(data_dir / images))
    hidden = annotations.issues["file-hidden"].offenders
    assert sorted(pathlib.Path(text.strip("'")).name for text in hidden) == [".hidden.png", ".notes.json"]


@pytest.mark.parametrize("folder", ["images", "images/cam1"])
def test_labelme_images_outside_the_directory_of_the_jsons_need_the_images_flag(tmp_path, folder):
    write_file(tmp_path, f"{folder}/a.png", black_image())
    text = labelme_json(f"..\\{folder}\\a.png".replace("/", "\\"), [("cat", "rectangle", [[3, 4], [10, 12]])])
    write_file(tmp_path, "labels/a.json", text)
    message = user_error(tmp_path / "labels")
    assert "a.json names '..\\\\images" in message and "which is not below" in message
    assert message.endswith(f"give the images' directory as --images={tmp_path}/{folder}")
    annotations, _ = read_labelme(tmp_path / "labels", images_dir=tmp_path / folder)
    assert annotations.file_names == ["a.png"]


def test_labelme_directory_that_also_has_xml_files_of_voc_is_converted_as_labelme_or_voc(tmp_path):
    write_labelme(tmp_path)
    write_voc(tmp_path)
    for source in ("labelme", "voc"):
        options = options_of(input=tmp_path, images=tmp_path, output=tmp_path / f"{source}.out")
        (annotations,) = convert(source, "coco", options)[0].values()
        assert annotations.boxes_ltwh_px.tolist() == [[3, 4, 7, 8], [0, 5, 20, 10]], source
    message = refusal(convert, "csv", "coco", options_of(input=tmp_path, output=tmp_path / "x.json"))
    assert (
        "a.xml is in another format: it is an xml of Pascal VOC: run tools/convert.py --from=voc" in message
    )


def test_directory_without_labelme_json_is_refused(tmp_path):
    assert "contains no json file of labelme" in user_error(tmp_path)


@pytest.mark.parametrize(
    ("kind", "points", "text"),
    [
        ("rectangle", [[3, 4]], "a rectangle needs at least 2 points, it has 1"),
        ("polygon", [[3, 4], [10, 12]], "a polygon needs at least 3 points, it has 2"),
        ("circle", [[3, 4]], "a circle needs at least 2 points, it has 1"),
        ("rectangle", [[3, 4], [10**400, 12]], "'shape_type': 'rectangle'"),
        ("rectangle", [[3], [4]], "'points': [[3], [4]]"),
    ],
)
def test_labelme_shape_with_too_few_points_or_too_large_a_number_is_an_error(data_dir, kind, points, text):
    write_file(data_dir, "a.json", labelme_json("a.png", [("cat", kind, points)]))
    message = data_error(data_dir)
    assert "a.json shape 1 'cat' has no valid label or points" in message and text in message


def test_labelme_label_that_is_no_text_is_an_error(data_dir):
    text = labelme_json("a.png", [("cat", "rectangle", [[3, 4], [10, 12]])])
    write_file(data_dir, "a.json", text.replace('"cat"', "null"))
    assert "a.json shape 1 None has no valid label or points" in data_error(data_dir)


@pytest.mark.parametrize("mask", ["@@", base64.b64encode(b"GIF89a" * 9).decode(), "iVBORw0KGgo="])
def test_labelme_mask_that_is_not_a_png_is_an_error(data_dir, mask):
    shape = json.loads(mask_shape())
    shape["shapes"][0]["mask"] = mask
    write_file(data_dir, "a.json", json.dumps(shape))
    assert "a.json shape 1 'cat' has no valid label or points" in data_error(data_dir)


def test_labelme_label_that_utf8_cannot_encode_is_an_error(data_dir):
    text = labelme_json("a.png", [("cat", "rectangle", [[3, 4], [10, 12]])])
    write_file(data_dir, "a.json", text.replace('"cat"', r'"\ud800"'))
    assert r"a.json shape 1 '\ud800' has no valid label" in data_error(data_dir)
