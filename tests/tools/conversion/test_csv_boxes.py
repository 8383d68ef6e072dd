import pytest

from common.data.labels import LabelMap
from tests.tools.conversion.exports import write_openimages, write_tensorflow_csv
from tests.tools.conversion.labelled_images import SKIP, black_image, read_functions, write_file
from tools.conversion import csv_boxes

read_csv, user_error, data_error = read_functions(csv_boxes.read_csv)

BOXES = [[3, 4, 7, 8], [0, 5, 20, 10]]


@pytest.fixture
def table(tmp_path):
    return write_tensorflow_csv(tmp_path)


def test_csv_of_tensorflow_has_edges_in_pixels_from_zero(table):
    annotations, images_dir = read_csv(table)
    assert annotations.boxes_ltwh_px.tolist() == BOXES
    assert annotations.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert (annotations.file_names, images_dir) == (["a.png", "b.png"], str(table.parent))
    assert not [issue.kind for issue in annotations.issues]


def test_openimages_csv_has_fractions_names_without_suffix_and_groups(tmp_path):
    table = write_openimages(tmp_path)
    annotations, _ = read_csv(table, names_file=tmp_path / "class-descriptions-boxable.csv")
    assert annotations.boxes_ltwh_px.tolist() == BOXES and not annotations.is_crowd.any()
    assert annotations.label_map.names == ("cat", "dog")
    assert annotations.file_names == ["a.png", "b.png"]
    annotations, _ = read_csv(write_openimages(tmp_path, is_group=1))
    assert annotations.is_crowd.all() and annotations.label_map.names == ("/m/cat", "/m/dog")


TABLES = {
    "semicolons": "image;label;x1;y1;x2;y2\na.png;cat;3;4;10;12\nb.png;dog;0;5;20;15\n",
    "tabs and other order": "Class\tX_Min\tX_Max\tY_Min\tY_Max\tFile Name\n"
    "cat\t3\t10\t4\t12\ta.png\ndog\t0\t20\t5\t15\tb.png\n",
    "fractions": "\ufefffilename,xmin,ymin,xmax,ymax,class\r\n"
    "a.png,.075,.2,.25,.6,cat\r\nb.png,0.0,0.25,0.5,0.75,dog\r\n",
    "paths": "path,class,xmin,ymin,xmax,ymax\n/data/x/a.png,cat,3,4,10,12\nC:\\x\\b.png,dog,0,5,20,15\n",
    "quotes": '"filename","class","xmin","ymin","xmax","ymax"\n"a.png","cat","3.0","4","10","12"\n'
    '"b.png","dog","0","5","20","15"\n',
}


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_csv_with_other_names_order_or_delimiter_has_the_same_boxes(table, text):
    table.write_bytes(text.encode())
    annotations, _ = read_csv(table)
    assert annotations.boxes_ltwh_px.tolist() == BOXES
    assert annotations.label_map.names == ("cat", "dog")


def test_csv_line_without_coordinates_is_an_image_without_objects(table):
    write_file(table.parent, "c.png", black_image())
    with table.open("a") as stream:
        stream.write("c.png,40,20,,,,,\n")
    annotations, _ = read_csv(table)
    assert annotations.file_names == ["a.png", "b.png", "c.png"] and annotations.num_boxes == 2


def test_image_that_no_line_of_the_csv_names_is_reported(table):
    write_file(table.parent, "sub/c.png", black_image())
    assert read_csv(table)[0].issues["image-unlabelled"].offenders == ["'sub/c.png'"]


def test_invalid_lines_of_a_csv_are_all_in_one_message(table):
    with table.open("a") as stream:
        stream.write("a.png,40,20,cat,3,4,ten,12\na.png,40,20,cat,10,4,3,12\na.png,40,20,,1,1,2,2\n")
        stream.write("gone.png,40,20,cat,3,4,10,12\na.png,40,20,cat,1,nan,2,3\n")
        stream.write("a.png,40,20,cat\n\na.png,40,20,cat, dog,3,4,10,12\n")
    message = data_error(table)
    for expected in (
        f"{table} line 4 has left, top, right, bottom = '3', '4', 'ten', '12'",
        f"{table} line 5 'cat' has left, top, right, bottom = [10.0, 4.0, 3.0, 12.0]",
        f"{table} line 6 '' has '', not one of 2 categories",
        "missing image file: image 'gone.png'",
        f"{table} line 8 has left, top, right, bottom = '1', 'nan', '2', '3'",
        f"{table} line 9 has 4 values for 8 columns: 'a.png,40,20,cat'",
        f"{table} line 11 has 9 values for 8 columns",
    ):
        assert expected in message, message


def test_csv_with_two_spellings_of_an_image_name_or_a_line_without_one_is_refused(table):
    with table.open("a") as stream:
        stream.write("./a.png,40,20,cat,3,4,10,12\n,40,20,cat,3,4,10,12\n")
    message = data_error(table)
    assert f"image 'a.png' is given 2 times: {table} line 2, {table} line 4" in message
    assert f"({table} line 5)" in message


def test_missing_image_of_a_csv_is_left_out_with_skip(table):
    (table.parent / "a.png").unlink()
    annotations, _ = read_csv(table, policy=SKIP)
    assert annotations.file_names == ["b.png"] and annotations.issues["image-missing"].count == 1


def test_csv_with_another_size_than_the_image_is_an_error(table):
    table.write_text(table.read_text().replace("40,20", "80,40"))
    assert "is 40 x 20 pixels, the annotations have 80 x 40" in data_error(table)


def test_csv_of_keras_retinanet_is_read_without_names_of_columns(table):
    table.write_text("a.png,,,,,\nb.png,0,5,20,15,dog\n")
    annotations, _ = read_csv(table)
    assert annotations.file_names == ["a.png", "b.png"] and annotations.label_map.names == ("dog",)
    assert annotations.boxes_ltwh_px.tolist() == [[0, 5, 20, 10]] and annotations.box_image.tolist() == [1]
    table.write_text("b.png,0,5,20,15,dog\na.png,3,4,ten,12,cat\n")
    assert f"{table} line 2 has left, top, right, bottom = '3', '4', 'ten', '12'" in data_error(table)


@pytest.mark.parametrize("line", ["a.png,3,4,10,12,cat,1", "a.txt,3,4,10,12,cat", "a.png,3,4,ten,12,cat"])
def test_csv_without_names_of_columns_in_another_form_is_refused(table, line):
    table.write_text(f"{line}\n")
    message = user_error(table)
    assert "has no column for image, category, left, top, right, bottom" in message
    assert "name the columns, for example filename,xmin,ymin,xmax,ymax,class" in message


@pytest.mark.parametrize("is_fraction", [True, False])
def test_csv_box_that_is_not_in_the_unit_of_most_boxes_is_an_error(table, is_fraction):
    rows = ["a.png,cat,.075,.2,.25,.6", "a.png,cat,3,4,10,12"]
    others = [f"b.png,dog,{'0,0.1,0.5,0.6' if is_fraction else '0,5,20,15'}"] * 2
    table.write_text("\n".join(["filename,class,xmin,ymin,xmax,ymax", rows[is_fraction], *others]))
    unit = "is in pixels, most others are in fractions" if is_fraction else "is in fractions, most"
    message = data_error(table)
    assert f"{table} line 2 'cat' {unit}" in message and "\n" not in message


def test_csv_edge_above_one_among_fractions_leaves_other_boxes_as_they_are(table):
    text = "filename,class,xmin,ymin,xmax,ymax\na.png,cat,.075,.2,.25,.6\nb.png,dog,0,.25,1.5,.75\n"
    table.write_text(text)
    assert read_csv(table)[0].boxes_ltwh_px.tolist() == [BOXES[0], [0, 5, 60, 10]]


def test_csv_whose_quotation_mark_hides_lines_is_refused(table):
    """The last column is not used, so that without a check the lines after the mark would be absent."""
    lines = ["filename,xmin,ymin,xmax,ymax,class,note"]
    lines += [f"{name}.png,3,4,10,12,cat,{note}" for name, note in (("a", '"x'), ("b", "y"), ("b", "z"))]
    table.write_text("\n".join(lines))
    assert "is not a csv file: unexpected end of data" in user_error(table)
    table.write_text("\n".join([*lines, 'b.png,1,2,3,4,dog,x"']))
    assert f"{table} line 2 has a quoted line feed" in data_error(table)
