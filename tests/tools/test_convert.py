"""The command: every direction there and back, flags that do nothing, and outputs that are in the way."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
from absl import flags

from common.datacheck.coco import load_coco
from common.datacheck.datasets import open_tfrecords
from common.datacheck.issues import DataError
from common.errors import UserError
from common.labels import LabelMap
from tools import convert as command
from tools.conversion.coco_to_tfrecord import write_tfrecords
from tools.conversion.convert import convert
from tools.conversion.options import Options

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def yolo(tmp_path):
    """A set of two images with YOLO's labels."""
    for number in (1, 2):
        for folder, name in (("images", f"{number}.png"), ("labels", f"{number}.txt")):
            (tmp_path / "set" / folder).mkdir(parents=True, exist_ok=True)
            path = tmp_path / "set" / folder / name
            if folder == "images":
                PIL.Image.new("RGB", (32, 16)).save(path)
            else:
                path.write_text("0 0.5 0.5 0.25 0.5\n")
    (tmp_path / "set" / "classes.txt").write_text("cat\n")
    return tmp_path / "set"


def run(source, target, **options):
    return convert(source, target, Options(**{key: os.fspath(value) for key, value in options.items()}))


def by_image(annotations):
    """{image id: (file name, size, [(box, category id, crowd, area), ...])}"""
    rows = list(
        zip(
            annotations.boxes_ltwh_px.tolist(),
            annotations.category_ids.tolist(),
            annotations.is_crowd.tolist(),
            annotations.areas.tolist(),
            strict=True,
        )
    )
    splits = annotations.row_splits.tolist()
    return {
        image_id: (
            annotations.file_names[i],
            annotations.image_sizes[i].tolist(),
            rows[splits[i] : splits[i + 1]],
        )
        for i, image_id in enumerate(annotations.image_ids.tolist())
    }


def test_coco_to_records_and_back(drawn, tmp_path):
    """Equal but for what records do not hold: boxes are clipped, those without area are gone."""
    source, images = drawn / "instances.json", drawn / "images"
    options = Options(input=str(source), images=str(images), output=str(tmp_path / "r" / "t"), num_shards=3)
    convert("coco", "tfrecord", options)
    assert len(list((tmp_path / "r").glob("t-*-of-00003.tfrecord"))) == 3
    back, images_dir = run(
        "tfrecord", "coco", input=tmp_path / "r" / "t*.tfrecord", output=tmp_path / "out.json"
    )

    assert images_dir == os.fspath(tmp_path / "images")
    found = load_coco(tmp_path / "out.json", tmp_path / "images")
    assert found.fingerprint() == back.fingerprint()
    expected = load_coco(source, images)
    assert found.label_map == expected.label_map
    original = by_image(expected)
    for name, (height, width), rows in original.values():
        kept = []
        for (x, y, w, h), *rest in rows:
            left, right = np.clip([x, x + w], 0, width)
            top, bottom = np.clip([y, y + h], 0, height)
            if right > left and bottom > top:
                kept.append(([left, top, right - left, bottom - top], *rest))
        rows[:] = kept
        assert (tmp_path / "images" / name).read_bytes() == (images / name).read_bytes()
    assert by_image(found) == original
    assert len(os.listdir(tmp_path / "images")) == 12


def test_bccd_to_records_and_back(bccd, tmp_path):
    source = bccd / "instances_test.json"
    run("coco", "tfrecord", input=source, images=bccd / "images", output=tmp_path / "t")
    found, _ = run("tfrecord", "coco", input=tmp_path / "t*.tfrecord", output=tmp_path / "out.json")
    assert by_image(found) == by_image(load_coco(source))  # whole pixels are whole pixels again


def test_voc_to_records_is_what_coco_to_records_is(bccd, tmp_path):
    voc = {"split": bccd / "val.txt", "label_map": bccd / "instances_train.json", "voc_pixels": "zero_based"}
    run(
        "voc",
        "tfrecord",
        input=bccd / "annotations_voc",
        images=bccd / "images",
        output=tmp_path / "v",
        **voc,
    )
    write_tfrecords(
        load_coco(bccd / "instances_val.json"), bccd / "images", tmp_path / "c" / "v", num_shards=1
    )
    name = "v-00000-of-00001.tfrecord"
    assert (tmp_path / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_yolo_to_records(yolo, tmp_path):
    run("yolo", "tfrecord", input=yolo, output=tmp_path / "y")
    found = open_tfrecords(f"{tmp_path}/y*.tfrecord").annotations
    assert found.label_map == LabelMap((1,), ("cat",))
    assert sorted(found.file_names) == ["1.png", "2.png"]
    assert found.boxes_ltwh_px.tolist() == [[12, 4, 8, 8]] * 2


@pytest.mark.parametrize("target", ["coco", "tfrecord"])
def test_output_that_is_there_stays_unless_told(yolo, tmp_path, target):
    output = tmp_path / "out" / "x.json"
    run("yolo", target, input=yolo, output=output)
    before = {path.name: path.read_bytes() for path in output.parent.iterdir()}
    (yolo / "labels" / "1.txt").write_text("")
    with pytest.raises(UserError, match="is there already: choose another --output, or --overwrite"):
        run("yolo", target, input=yolo, output=output)
    assert {path.name: path.read_bytes() for path in output.parent.iterdir()} == before
    convert("yolo", target, Options(input=str(yolo), output=str(output), overwrite=True))
    after = {path.name: path.read_bytes() for path in output.parent.iterdir()}
    assert set(after) == set(before) and after != before


def test_another_prefix_is_not_in_the_way(yolo, tmp_path):
    run("yolo", "tfrecord", input=yolo, output=tmp_path / "a-more")
    run("yolo", "tfrecord", input=yolo, output=tmp_path / "a")
    run("yolo", "tfrecord", input=yolo, output=tmp_path / "[a]")
    with pytest.raises(UserError, match="is there already"):
        run("yolo", "tfrecord", input=yolo, output=tmp_path / "[a]")


def spoil_label(yolo):
    (yolo / "labels" / "2.txt").write_text("0 0.5 0.5 0.25\n")


def spoil_image(yolo):
    (yolo / "images" / "2.png").write_bytes(b"")


@pytest.mark.parametrize("target", ["coco", "tfrecord"])
@pytest.mark.parametrize(
    ("spoil", "offender"), [(spoil_label, "2.txt line 1 '0 0.5 0.5 0.25'"), (spoil_image, "image '2.png'")]
)
def test_a_fault_leaves_nothing_behind(yolo, tmp_path, target, spoil, offender):
    spoil(yolo)
    with pytest.raises(DataError, match=offender):
        run("yolo", target, input=yolo, output=tmp_path / "out" / "x.json")
    assert os.listdir(tmp_path) == ["set"]


def test_faults_in_records_leave_nothing_behind(drawn_records, tmp_path):
    shutil.copytree(drawn_records.parent, tmp_path / "r")
    file = tmp_path / "r" / "drawn-00001-of-00003.tfrecord"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"cut off: .*drawn-00001-of-00003\.tfrecord record 3 "):
        run("tfrecord", "coco", input=tmp_path / "r" / "*.tfrecord", output=tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["r"]


def test_skipped_images_are_left_out(yolo, tmp_path):
    spoil_image(yolo)
    run("yolo", "coco", input=yolo, output=tmp_path / "x.json", on_bad_image="skip")
    assert load_coco(tmp_path / "x.json", yolo / "images").file_names == ["1.png"]


def test_records_take_jpeg_and_png(yolo, tmp_path):
    PIL.Image.new("RGB", (32, 16)).save(yolo / "images" / "2.png", format="BMP")
    with pytest.raises(UserError, match=r"2\.png is BMP: TFRecords hold JPEG and PNG"):
        run("yolo", "tfrecord", input=yolo, output=tmp_path / "out" / "x")
    assert not os.listdir(tmp_path / "out")


def test_images_over_the_limit(yolo, tmp_path):
    options = Options(input=str(yolo), output=str(tmp_path / "x.json"), max_megapixels=0.0005)
    with pytest.raises(DataError, match="--max_megapixels"):
        convert("yolo", "coco", options)


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("coco", "coco", {}, "--from=coco --to=coco: there is nothing to convert"),
        ("tfrecord", "tfrecord", {}, "there is nothing to convert"),
        ("coco", "tfrecord", {}, "--from=coco needs --images=DIR"),
        ("voc", "coco", {}, "JPEGImages is not a directory: give that of the images as --images=DIR"),
        ("voc", "coco", {"images": "."}, "no xml file there"),
        ("voc", "coco", {"images": ".", "split": "train"}, "no xml file there"),
        ("tfrecord", "coco", {}, "no file matches"),
        ("yolo", "coco", {"output": "."}, "--output=. is a directory: name the json file to write"),
        ("yolo", "tfrecord", {"output": "set/"}, "--output=set/ is a directory"),
        ("yolo", "coco", {"output": "set/classes.txt/x.json"}, "set/classes.txt"),
        ("yolo", "coco", {"label_map": "gone"}, "label map gone: No such file"),
    ],
)
def test_what_cannot_be_converted(yolo, monkeypatch, source, target, options, message):
    monkeypatch.chdir(yolo.parent)
    if source == "tfrecord":
        options = {"input": "gone*", **options}
    with pytest.raises(UserError) as refused:
        run(source, target, **{"input": "set", "output": "x.json", **options})
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert os.listdir(".") == ["set"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--from=voc", "--to=coco", "--names=x"], "names"),
        (["--from=yolo", "--to=coco", "--voc_pixels=zero_based"], "voc_pixels"),
        (["--from=yolo", "--to=coco", "--images=x"], "images"),
        (["--from=coco", "--to=tfrecord", "--split=x"], "split"),
        (["--from=voc", "--to=coco", "--num_shards=2"], "num_shards"),
        (["--from=voc", "--to=tfrecord", "--num_shards=2", "--difficult=drop", "--images=x"], None),
        (["--from=tfrecord", "--to=coco", "--label_map=x", "--images=x"], None),
    ],
)
def test_flags_that_do_nothing_are_refused(arguments, name):
    fv = flags.FlagValues()
    command.define_flags(fv)
    fv(["convert", *arguments, "--input=a", "--output=b"])
    if name is None:
        command.refuse_idle_flags(fv)
        return
    with pytest.raises(UserError, match=f"--{name} does nothing from "):
        command.refuse_idle_flags(fv)


def test_the_command(yolo, tmp_path):
    arguments = ["--from=yolo", "--to=coco", f"--input={yolo}", f"--output={tmp_path}/x.json"]
    (yolo / "labels" / "2.txt").unlink()
    done = subprocess.run(
        [sys.executable, "tools/convert.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 images (1 without objects), 1 objects of 1 classes" in done.stdout
    assert f"coco: {tmp_path}/x.json; images: {yolo}/images" in done.stdout
    assert "image without a label file: image '2.png'" in done.stderr
    assert json.loads((tmp_path / "x.json").read_text())["annotations"][0]["bbox"] == [12, 4, 8, 8]


def test_the_command_says_what_is_wrong(yolo, tmp_path):
    spoil_label(yolo)
    arguments = ["--from=yolo", "--to=coco", f"--input={yolo}", f"--output={tmp_path}/x.json"]
    done = subprocess.run(
        [sys.executable, "tools/convert.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "2.txt line 1 '0 0.5 0.5 0.25' has 4 numbers" in line
