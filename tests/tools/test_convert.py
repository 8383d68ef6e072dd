import dataclasses
import functools
import hashlib
import json
import os
import shutil
import sys

import numpy as np
import PIL.Image
import pytest
from absl import flags

from common.data import storage
from common.data.check.issues import DataError
from common.data.coco import load_coco
from common.data.labels import LabelMap
from common.data.open import open_tfrecords, open_webdataset
from common.errors import UserError
from tests import commands
from tests.common import made_annotations
from tests.common.coco_documents import SMALL, draw_images, write_json
from tests.refusal import refusal
from tests.tools.conversion.labelled_images import contents_of, options_of, write_file, write_yolo
from tools import convert as command
from tools.conversion.coco_to_tfrecord import write_tfrecords
from tools.conversion.coco_writer import round_boxes
from tools.convert import convert, split


@pytest.fixture
def yolo(tmp_path):
    return write_yolo(tmp_path / "set")


def run(source, target, **options):
    return convert(source, target, options_of(**options))


refused = functools.partial(refusal, run)


def test_coco_converted_to_tfrecord_and_back_has_equal_annotations_and_images(drawn, tmp_path):
    images, output = drawn / "images", tmp_path / "out.json"
    names = {"input": drawn / "instances.json", "images": images, "output": tmp_path / "r" / "t"}
    run("coco", "tfrecord", **names, num_shards=3)
    records = tmp_path / "r" / "t-*-of-00003.tfrecord"
    parts, images_dir = run("tfrecord", "coco", input=records, output=output)
    (annotations,) = parts.values()
    assert images_dir == os.fspath(tmp_path / "images")
    expected = round_boxes(open_tfrecords(os.fspath(records)).annotations)
    assert load_coco(output, images_dir).fingerprint() == annotations.fingerprint() == expected.fingerprint()
    assert contents_of(tmp_path / "images") == contents_of(images)
    assert sorted(os.listdir(tmp_path)) == ["images", "out.json", "r"]


def test_coco_converted_to_webdataset_and_back_has_equal_annotations_and_images(drawn, tmp_path):
    images, output = drawn / "images", tmp_path / "out.json"
    names = {"input": drawn / "instances.json", "images": images, "output": tmp_path / "s" / "t"}
    run("coco", "webdataset", **names, num_shards=3)
    shards = f"{tmp_path}/s/t-*-of-00003.tar"
    parts, images_dir = run("webdataset", "coco", input=shards, output=output)
    (annotations,) = parts.values()
    expected, actual = load_coco(drawn / "instances.json"), load_coco(output, images_dir)
    assert actual.fingerprint() == annotations.fingerprint()
    assert sorted(actual.image_ids.tolist()) == sorted(expected.image_ids.tolist())
    order = [actual.image_ids.tolist().index(image_id) for image_id in expected.image_ids.tolist()]
    for name in ("boxes_ltwh_px", "category_ids", "is_crowd", "areas"):
        values = [
            [getattr(each, name)[slice(*each.row_splits[row : row + 2])].tolist() for row in rows]
            for each, rows in ((actual, order), (expected, range(expected.num_images)))
        ]
        assert values[0] == values[1]
    assert contents_of(tmp_path / "images") == contents_of(images)


def test_containers_of_both_formats_have_the_images_in_the_same_order_and_convert_into_each_other(
    drawn, tmp_path
):
    names = {"input": drawn / "instances.json", "images": drawn / "images", "num_shards": 2}
    run("coco", "tfrecord", **names, output=tmp_path / "r")
    run("coco", "webdataset", **names, output=tmp_path / "s")
    records, shards = open_tfrecords(f"{tmp_path}/r-*.tfrecord"), open_webdataset(f"{tmp_path}/s-*.tar")
    assert records.annotations.image_ids.tolist() == shards.annotations.image_ids.tolist()
    run("tfrecord", "webdataset", input=f"{tmp_path}/r-*.tfrecord", output=tmp_path / "new" / "s")
    run("webdataset", "tfrecord", input=f"{tmp_path}/s-*.tar", output=tmp_path / "new" / "r", max_side=100)
    assert set(os.listdir(tmp_path / "new")) == {
        *("r.label_map.json", "r-00000-of-00001.tfrecord", "r-00000-of-00001.tfrecord.idx"),
        *("s.label_map.json", "s-00000-of-00001.tar"),
    }
    again = open_webdataset(f"{tmp_path}/new/s-*.tar")
    assert open_tfrecords(f"{tmp_path}/new/r-*.tfrecord").annotations.image_sizes.max() == 100
    rows = [again.annotations.image_ids.tolist().index(i) for i in shards.annotations.image_ids]
    assert [again.encoded(row) for row in rows] == [shards.encoded(row) for row in range(shards.size)]


def test_bccd_tfrecords_converted_from_voc_equal_those_converted_from_its_coco_json(bccd, tmp_path):
    train, test, images = (bccd / name for name in ("instances_train.json", "instances_test.json", "images"))
    voc = {"split": bccd / "test.txt", "label_map": train, "voc_pixels": "zero_based"}
    run("voc", "tfrecord", input=bccd / "annotations_voc", images=images, output=tmp_path / "v", **voc)
    write_tfrecords(load_coco(test), images, tmp_path / "c" / "v", num_shards=1)
    name = "v-00000-of-00001.tfrecord"
    assert (tmp_path / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_tfrecords_with_a_longer_or_glob_like_prefix_do_not_count_as_existing(yolo, tmp_path):
    for name in ("a-more", "a", "[a]"):
        run("yolo", "tfrecord", input=yolo, output=tmp_path / name)
    assert "exists already" in refused("yolo", "tfrecord", input=yolo, output=tmp_path / "[a]")
    result = open_tfrecords(f"{tmp_path}/a-0*.tfrecord").annotations
    assert result.label_map == LabelMap((1, 2), ("cat", "dog"))
    assert sorted(result.file_names) == ["a.png", "b.png"]
    assert sorted(result.boxes_ltwh_px.tolist()) == [[0, 0, 20, 20], [15, 5, 10, 10]]


def test_boxes_that_a_conversion_clips_or_drops_are_named_with_their_label_file(yolo, tmp_path):
    labels = yolo / "labels" / "a.txt"
    labels.write_text("0 0.5 0.5 0.2 0.2\n0 1 0.5 0.2 0.2\n0 1.2 0.5 0.2 0.2\n")
    (result,) = run("yolo", "tfrecord", input=yolo, output=tmp_path / "records")[0].values()
    offenders = {issue.kind: issue.offenders for issue in result.issues}
    place = f"image 'a.png' ({labels}) has left, top, width, height = "
    assert offenders == {
        "box-outside": [f"{place}[36.0, 8.0, 8.0, 4.0]"],
        "box-empty": [f"{place}[44.0, 8.0, 8.0, 4.0]"],
    }


@pytest.mark.parametrize("target", ["coco", "tfrecord", "webdataset"])
def test_existing_output_of_a_conversion_is_refused_without_overwrite(yolo, tmp_path, target):
    output = tmp_path / "out" / "x.json"
    run("yolo", target, input=yolo, output=output)
    before = contents_of(output.parent)
    (yolo / "labels" / "a.txt").write_text("")
    message = refused("yolo", target, input=yolo, output=output)
    assert message.endswith(" exists already: choose another --output, or give --overwrite")
    assert contents_of(output.parent) == before
    run("yolo", target, input=yolo, output=output, overwrite=True)
    after = contents_of(output.parent)
    assert set(after) == set(before) and after != before


def test_conversion_refuses_an_unusable_image_and_leaves_it_out_with_on_bad_image_skip(yolo, tmp_path):
    options = {"input": yolo, "output": tmp_path / "x.json"}
    assert "--max_megapixels" in refused("yolo", "coco", **options, max_megapixels=0.0005, error=DataError)
    write_file(yolo, "images/b.png", b"")
    assert "empty image file: image 'b.png'" in refused("yolo", "coco", **options)
    assert os.listdir(tmp_path) == ["set"]
    run("yolo", "coco", **options, on_bad_image="skip")
    assert load_coco(tmp_path / "x.json", yolo / "images").file_names == ["a.png"]


@pytest.mark.parametrize(("source", "target"), [("coco", "coco"), ("coco", "tfrecord"), ("tfrecord", "coco")])
def test_holdout_and_max_side_write_two_parts_with_scaled_images(
    drawn, drawn_records, tmp_path, source, target
):
    before = contents_of(drawn / "images")
    options = {"input": drawn / "instances.json", "images": drawn / "images"}
    if source == "tfrecord":
        options = {"input": f"{drawn_records}-*.tfrecord", "images": tmp_path / "images_103"}
    run(source, target, **options, output=tmp_path / "x.json", max_side=103, holdout=0.2)
    truth = load_coco(drawn / "instances.json")
    parts = []
    for name in ("train", "val"):
        if target == "tfrecord":
            parts.append(open_tfrecords(f"{tmp_path}/x.json_{name}-*.tfrecord").annotations)
        else:
            parts.append(load_coco(tmp_path / f"x_{name}.json", tmp_path / "images_103"))
    assert [part.num_images for part in parts] == [10, 2]
    assert set(parts[1].file_names) == {"06.jpg", "09.jpg"}
    ids = np.concatenate([part.image_ids for part in parts]).tolist()
    assert sorted(ids) == sorted(truth.image_ids.tolist())
    for part in parts:
        assert part.label_map == truth.label_map and part.image_sizes.max() == 103
        part_truth = truth.select(np.isin(truth.image_ids, part.image_ids))
        boxes, _, has_area = part_truth.clipped_boxes
        is_written = has_area | (target == source == "coco")
        order = np.argsort(part.image_ids[part.box_image], kind="stable")
        expected = np.argsort(part_truth.image_ids[part_truth.box_image[is_written]], kind="stable")
        np.testing.assert_allclose(part.clipped_boxes[0][order], boxes[is_written][expected], atol=1e-5)
        assert part.is_crowd[order].tolist() == part_truth.is_crowd[is_written][expected].tolist()
    if target == "coco":
        after = contents_of(tmp_path / "images_103")
        assert {name for name in before if before[name] == after[name]} == {"06.jpg"}
    assert contents_of(drawn / "images") == before


RLE = {"counts": [3, 5, 192], "size": [10, 20]}
EXPORT = {
    "info": {"description": "mine", "contributor": ""},
    "licenses": [{"id": 3, "name": "CC BY", "url": "http://a/b"}],
    "images": [
        {"id": 42, "file_name": "a.jpg", "width": 20, "height": 10, "license": 3, "date_captured": 0},
        {"id": 7, "file_name": "sub/b.jpg", "width": 30, "height": 40, "coco_url": ""},
    ],
    "annotations": [
        {"id": 11, "image_id": 42, "category_id": 2, "bbox": [0, 0, 20, 10], "segmentation": RLE, "area": 5},
        {
            "id": 12,
            "image_id": 7,
            "category_id": 9,
            "segmentation": [[2, 4, 10, 4, 10, 20], [2, 4, 3, 4, 3, 5]],
            "keypoints": [2, 4, 2, 10, 20, 1, 0, 0, 0],
            "num_keypoints": 2,
            "bbox": [2, 4, 8, 16],
            "area": 64,
            "attributes": {"occluded": False, "track": [1]},
        },
    ],
    "categories": [{"id": 2, "name": "two", "supercategory": "x"}, {"id": 9, "name": "nine"}],
    "mine": {"x": None},
}


@pytest.fixture
def export(tmp_path):
    """The flags of a data set with EXPORT and its images."""
    images = draw_images(tmp_path)
    return {"input": write_json(tmp_path, EXPORT), "images": images, "output": tmp_path / "out" / "x.json"}


@pytest.mark.parametrize("note", [None, float("nan")], ids=["strict json", "json with nan"])
def test_split_of_a_json_has_all_keys_of_its_records_and_lists(export, note):
    export["input"].write_text(json.dumps(EXPORT | {"mine": {"x": note}}))
    run("coco", "coco", **export, holdout=0.5)
    parts = [
        json.loads((export["output"].parent / f"x_{name}.json").read_text()) for name in ("train", "val")
    ]
    rows = [next(row for row in (0, 1) if part["images"] == [EXPORT["images"][row]]) for part in parts]
    assert sorted(rows) == [0, 1]
    for part, row in zip(parts, rows, strict=True):
        assert part == EXPORT | {key: [EXPORT[key][row]] for key in ("images", "annotations")}


@pytest.mark.parametrize(
    ("note", "copied"),
    [(r'"\ud800"', "?"), ("9" * 5000, None)],
    ids=["half of a surrogate pair", "5000 digits"],
)
def test_values_that_json_writers_refuse_are_replaced_in_keys_that_are_only_copied(export, note, copied):
    export["input"].write_text(json.dumps(EXPORT).replace('"track": [1]', f'"track": [{note}]'))
    run("coco", "coco", **export, max_side=20)
    document = json.loads(export["output"].read_text())
    assert document["annotations"][1]["attributes"]["track"] == [copied]
    assert len(document["annotations"]) == 2


def test_json_of_scaled_images_has_scaled_shapes_and_reports_masks_that_are_left_out(export, capfd):
    run("coco", "coco", **export, max_side=20)  # only image 7 is larger: 30 x 40 becomes 15 x 20
    document = json.loads(export["output"].read_text())
    image, an_object = EXPORT["images"][1], EXPORT["annotations"][1]
    assert document["images"] == [EXPORT["images"][0], image | {"width": 15, "height": 20}]
    assert document["annotations"] == [
        EXPORT["annotations"][0],
        an_object
        | {
            "bbox": [1, 2, 4, 8],
            "area": 16,
            "segmentation": [[1, 2, 5, 2, 5, 10], [1, 2, 1.5, 2, 1.5, 2.5]],
            "keypoints": [1, 2, 2, 5, 10, 1, 0, 0, 0],
        },
    ]
    assert "left out" not in capfd.readouterr().err
    run("coco", "coco", **export, max_side=10, overwrite=True)
    expected = {key: value for key, value in EXPORT["annotations"][0].items() if key != "segmentation"}
    scaled = json.loads(export["output"].read_text())["annotations"][0]
    assert scaled == expected | {"bbox": [0, 0, 10, 5], "area": 1.25}
    line = f"{export['output']}: 1 masks (RLE) are left out, because --max_side cannot scale them"
    assert line in capfd.readouterr().err


@pytest.mark.parametrize("note", [None, float("nan")], ids=["strict json", "json with nan"])
def test_keys_that_tfrecords_do_not_hold_are_logged(export, note, capfd):
    changes = {"annotations": [*EXPORT["annotations"], EXPORT["annotations"][0] | {"id": 13, "track": note}]}
    export["input"].write_text(json.dumps(EXPORT | changes))
    run("coco", "tfrecord", **export | {"output": export["output"].with_name("x")})
    keys = "info, licenses, mine, images.license, images.date_captured, annotations.segmentation, "
    keys += (
        "annotations.keypoints, annotations.num_keypoints, annotations.attributes, categories.supercategory"
    )
    text = capfd.readouterr().err
    assert f"{export['input']}: these keys are not in the output: {keys}\n" in text


def test_conversion_of_a_json_without_other_keys_logs_no_lost_keys(export, capfd):
    images = [
        {key: image[key] for key in ("id", "file_name", "width", "height")} for image in EXPORT["images"]
    ]
    an_object = {"id": 1, "image_id": 7, "category_id": 2, "bbox": [2, 4, 8, 16], "segmentation": []}
    categories = [{"id": 2, "name": "two"}]
    document = {"images": images, "annotations": [an_object], "categories": categories}
    export["input"].write_text(json.dumps(document))
    run("coco", "tfrecord", **export | {"output": export["output"].with_name("x")})
    assert "not in the output" not in capfd.readouterr().err


def test_conversion_with_coco_pixels_turned_writes_boxes_of_the_stored_pixels(tmp_path):
    image = PIL.Image.new("RGB", (40, 20))
    image.getexif()[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=image.getexif())
    an_object = {"id": 1, "image_id": 1, "category_id": 2, "bbox": [3, 10, 5, 18]}
    records = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 40, "height": 20}],
        "annotations": [an_object],
    }
    options = {"input": write_json(tmp_path, SMALL | records), "images": tmp_path}
    run("coco", "coco", **options, output=tmp_path / "x.json", coco_pixels="turned")
    assert load_coco(tmp_path / "x.json", tmp_path).boxes_ltwh_px.tolist() == [[10, 12, 18, 5]]


def test_more_shards_than_images_of_a_part_are_refused_before_writing(drawn, tmp_path):
    options = {"input": drawn / "instances.json", "images": drawn / "images", "output": tmp_path / "x"}
    assert "--num_shards=5 is not in 1..2" in refused(
        "coco", "tfrecord", **options, holdout=0.2, num_shards=5
    )
    assert not os.listdir(tmp_path)


def test_holdout_split_depends_only_on_file_names_seed_and_fraction():
    data = made_annotations.annotations([(20, 40)] * 40, [])
    names = {seed: split(data, 0.3, seed)[1].file_names for seed in (0, 1)}
    assert [len(held_out) for held_out in names.values()] == [12, 12] and names[0] != names[1]
    reversed_data = dataclasses.replace(data, file_names=data.file_names[::-1])
    assert split(reversed_data, 0.3, 0)[1].file_names == names[0][::-1]
    first = min(data.file_names, key=lambda name: hashlib.sha256(f"0 {name}".encode()).hexdigest())
    assert split(data, 0.03, 0)[1].file_names == [first]


def test_conversion_with_max_side_refuses_to_replace_the_original_images(yolo, tmp_path):
    options = {"input": yolo, "output": tmp_path / "x.json", "max_side": 20}
    run("yolo", "coco", **options)
    small = load_coco(tmp_path / "x.json", tmp_path / "images_20")
    assert sorted(small.boxes_ltwh_px.tolist()) == [[0, 0, 10, 10], [7.5, 2.5, 5, 5]]
    (tmp_path / "x.json").rename(tmp_path / "y.json")
    assert "images_20/a.png exists already" in refused("yolo", "coco", **options)
    run("yolo", "coco", **options, overwrite=True)
    second_options = {
        **options,
        "input": tmp_path / "y.json",
        "images": tmp_path / "set" / ".." / "images_20",
    }
    assert "images_20 has the original images" in refused("coco", "coco", **second_options, overwrite=True)


REFUSED = [
    ("coco", "coco", {"input": "gone"}, "--from=coco --to=coco: there is nothing to convert"),
    ("coco", "tfrecord", {}, "set is in another format: it is a directory of YOLO's labels: run tools/con"),
    ("coco", "tfrecord", {"input": "gone"}, "--from=coco needs --images=DIR"),
    ("voc", "coco", {"input": "gone"}, "--input=gone is not a directory"),
    ("voc", "coco", {"input": "set/images", "images": "."}, "contains no xml file"),
    ("tfrecord", "coco", {"input": "gone*"}, "no file matches"),
    ("tfrecord", "webdataset", {"input": "gone/*", "output": "new/x"}, "no file matches"),
    ("yolo", "coco", {"output": ""}, "--output is empty: give a path"),
    ("yolo", "coco", {"output": "."}, "--output=. is a directory: add a file name"),
    ("yolo", "coco", {"output": "new/"}, "--output=new/ is a directory: add a file name"),
    ("yolo", "tfrecord", {"output": "set/", "holdout": 0.5}, "output=set/ is a directory: add a file name"),
    ("tfrecord", "tfrecord", {"input": "gone", "holdout": 0.5}, "--to=tfrecord: there is nothing to convert"),
    ("webdataset", "webdataset", {"input": "gone"}, "--to=webdataset: there is nothing to convert"),
    ("yolo", "coco", {"holdout": 0.0}, "--holdout=0.0: give a fraction above 0 and below 1"),
    ("yolo", "coco", {"holdout": float("nan")}, "--holdout=nan: give a fraction above 0 and below 1"),
    ("yolo", "coco", {"holdout": 0.8, "max_side": 20}, "--holdout=0.8 selects 2 of 2 images"),
    ("yolo", "coco", {"output": "set/classes.txt/x.json"}, "set/classes.txt"),
    ("yolo", "coco", {"label_map": "gone"}, "label map gone: No such file"),
]


@pytest.mark.parametrize(
    ("source", "target", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_conversion_with_wrong_formats_paths_or_holdout_is_refused_and_writes_nothing(
    yolo, monkeypatch, source, target, options, message
):
    monkeypatch.chdir(yolo.parent)
    assert message in refused(source, target, **{"input": "set", "output": "x.json", **options})
    assert os.listdir(".") == ["set"]


WITHOUT_EFFECT = {
    "names": "--from=voc --to=coco --names=x",
    "voc_pixels": "--from=yolo --to=coco --voc_pixels=zero_based",
    "images": "--from=yolo --to=coco --images=x",
    "split": "--from=coco --to=tfrecord --split=x",
    "num_shards": "--from=voc --to=coco --num_shards=2",
    "seed": "--from=coco --to=coco --max_side=9 --seed=1",
}
WITH_EFFECT = [
    "--from=voc --to=tfrecord --num_shards=2 --difficult=drop --images=x",
    "--from=tfrecord --to=coco --label_map=x --images=x",
    "--from=webdataset --to=tfrecord --label_map=x --num_shards=2 --seed=1",
    "--from=coco --to=coco --max_side=9 --holdout=0.5 --seed=1 --images=x",
]


def message_of_command(words, monkeypatch):
    """Runs the command with an input that is missing."""
    flag_values = flags.FlagValues()
    command.define_flags(flag_values)
    flag_values(["convert", *words.split(), "--input=gone", "--output=x.json"])
    monkeypatch.setattr(flags, "FLAGS", flag_values)
    return refusal(command.main, error=(UserError, OSError))


@pytest.mark.parametrize(("name", "words"), WITHOUT_EFFECT.items(), ids=WITHOUT_EFFECT)
def test_conversion_flag_without_effect_on_the_chosen_formats_is_refused(name, words, monkeypatch):
    assert message_of_command(words, monkeypatch).startswith(f"--{name} has no effect on ")


@pytest.mark.parametrize("words", WITH_EFFECT)
def test_conversion_flags_with_effect_on_the_chosen_formats_are_accepted(words, monkeypatch):
    assert "has no effect" not in message_of_command(words, monkeypatch)


def test_convert_command_writes_reproducible_records_and_reports_skipped_images(drawn, tmp_path):
    shutil.copytree(drawn, tmp_path / "data")
    images, instances = tmp_path / "data" / "images", tmp_path / "data" / "instances.json"
    annotations = load_coco(instances, images)
    readable = np.array([name != "05.jpg" for name in annotations.file_names])
    (images / "05.jpg").write_bytes(b"no image")
    paths = [f"--images={images}", f"--input={instances}", f"--output={tmp_path}/t"]
    words = ["--from=coco", "--to=tfrecord", *paths, "--num_shards=2", "--on_bad_image=skip"]
    done = commands.run(sys.executable, "tools/convert.py", *words)
    write_tfrecords(annotations.select(readable), images, tmp_path / "again" / "t", num_shards=2)
    assert contents_of(tmp_path) == contents_of(tmp_path / "again")
    assert "11 images (1 without objects)" in done.stdout
    assert f"tfrecord: {tmp_path}/t-*-of-00002.tfrecord; images from {images}" in done.stdout
    assert "1 box clipped to their image, 2 without area dropped" in done.stdout
    assert "Writing t: 11 images in" in done.stderr and "Writing t" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "file that is not an image" in line]
    assert "image 25 ('05.jpg')" in line and line.endswith("Left out by --on_bad_image=skip")


@pytest.mark.parametrize("target", ["tfrecord", "webdataset"])
def test_conversion_to_a_bucket_has_the_same_files_as_one_to_a_disk(drawn, tmp_path, bucket, target):
    options = {
        "input": drawn / "instances.json",
        "images": drawn / "images",
        "num_shards": 2,
        "holdout": 0.25,
    }
    for output in (tmp_path / "t", f"{bucket}/sets/t"):
        run("coco", target, **options, output=output)
    names = [path.removeprefix(f"{bucket}/sets/") for path in storage.match(f"{bucket}/**")]
    assert names == sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".idx")
    assert all(storage.read(f"{bucket}/sets/{name}") == (tmp_path / name).read_bytes() for name in names)
    message = refused("coco", target, **options, output=f"{bucket}/sets/t")
    assert message.startswith(f"{bucket}/sets/t_train.label_map.json exists already: ")
    run(target, "coco", input=f"{bucket}/sets/t_val-*", output=tmp_path / "back.json")
    assert load_coco(tmp_path / "back.json", tmp_path / "images").num_images == 3


def test_shards_in_a_bucket_are_converted_to_records_in_a_bucket_without_files_on_the_disk(
    drawn, tmp_path, bucket, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = {"input": drawn / "instances.json", "images": drawn / "images"}
    run("coco", "webdataset", **options, output=f"{bucket}/s/t")
    run("webdataset", "tfrecord", input=f"{bucket}/s/t-*.tar", output=f"{bucket}/r/t")
    assert open_tfrecords(f"{bucket}/r/t-*").size == 12
    assert not list(tmp_path.iterdir())


def test_conversion_to_a_bucket_that_fails_leaves_no_label_map(drawn, bucket, monkeypatch):
    options = {"input": drawn / "instances.json", "images": drawn / "images", "output": f"{bucket}/t"}
    run("coco", "tfrecord", **options, num_shards=2)
    message = refused("coco", "tfrecord", **options, num_shards=3, overwrite=True)
    assert message.startswith(f"{bucket}/t-00000-of-00002.tfrecord is a file of an earlier conversion")
    upload, files = storage.upload, []

    def fail_once(file, path):
        files.append(path)
        if len(files) == 2:
            raise storage.StoreError(f"{path}: the store is full")
        upload(file, path)

    monkeypatch.setattr(storage, "upload", fail_once)
    assert refused("coco", "tfrecord", **options, num_shards=2, overwrite=True).endswith("the store is full")
    assert not storage.is_file(f"{bucket}/t.label_map.json")


def test_conversion_refuses_a_json_or_images_in_a_bucket():
    message = refused("yolo", "coco", input="x", output="s3://data/x.json")
    assert message.startswith("--output=s3://data/x.json is in a bucket: give a path on a disk")
    message = refused("coco", "tfrecord", input="x", images="s3://data/images", output="s3://data/x")
    assert message.startswith("--images=s3://data/images is in a bucket")
    for source in ("coco", "voc", "yolo", "cvat", "labelme", "csv", "detections"):
        message = refused(source, "tfrecord", input="s3://data/x", images="images", output="x")
        assert message.startswith("--input=s3://data/x is in a bucket: only TFRecords and WebDataset are")


def test_joined_jsons_have_the_images_and_boxes_of_both_with_new_ids(tmp_path):
    sets = []
    for name in ("a", "b/c"):
        (tmp_path / name / "images").mkdir(parents=True)
        images = draw_images(tmp_path / name / "images")
        sets.append((write_json(tmp_path / name, SMALL), images))
    files, directories = (",".join(map(os.fspath, paths)) for paths in zip(*sets, strict=True))
    _, images_dir = run("coco", "coco", input=files, images=directories, output=tmp_path / "both.json")
    assert os.path.abspath(images_dir) == os.fspath(tmp_path)
    joined, originals = load_coco(tmp_path / "both.json", tmp_path), [load_coco(*pair) for pair in sets]
    expected = [
        (f"{folder}/images/{part.file_names[image]}", category, *box)
        for folder, part in zip(("a", "b/c"), originals, strict=True)
        for image, category, box in zip(part.box_image, part.category_ids, part.boxes_ltwh_px, strict=True)
    ]
    rows = zip(joined.box_image, joined.category_ids, joined.boxes_ltwh_px, strict=True)
    assert [(joined.file_names[image], category, *box) for image, category, box in rows] == expected
    assert joined.image_ids.tolist() == list(range(1, 2 * originals[0].num_images + 1))


def test_jsons_that_name_the_same_image_are_not_joined(tmp_path):
    images, json_path = draw_images(tmp_path), write_json(tmp_path, SMALL)
    options = {"input": f"{json_path}, {json_path}", "images": f"{images},{images}"}
    message = refused("coco", "coco", **options, output=tmp_path / "both.json")
    assert SMALL["images"][0]["file_name"] in message and "is an image of more than one json" in message


def test_jsons_with_different_categories_or_too_few_directories_are_not_joined(tmp_path):
    images = draw_images(tmp_path)
    (tmp_path / "other").mkdir()
    other = SMALL | {"categories": [*SMALL["categories"], {"id": 77, "name": "whale"}]}
    files = f"{write_json(tmp_path, SMALL)},{write_json(tmp_path / 'other', other)}"
    options = {"input": files, "output": tmp_path / "both.json"}
    message = refused("coco", "coco", **options, images=f"{images},{images}")
    assert "need the same categories: category 77 is 'whale', in " in message and "it is absent" in message
    message = refused("coco", "coco", **options, images=images)
    assert "--input names 2 files, but --images 1 folder: give one for each" in message
