"""Tests tools/bench.py with both apps: measuring.py and worker.py of tools/benchmark."""

import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

from common import args as shared_flags
from common.data.open import open_source
from tests.apps.conftest import APPS, coco_flags, one_app
from tests.refusal import refusal
from tests.small_apps import eagerly
from tools.benchmark import measuring, options, report, stages, worker
from tools.benchmark.options import BenchArgs

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASELINE = "import time; print('ready')\nwhile True: time.sleep(0.001); print('step 3')"
# Keys of the file that --json writes.
KEYS = {
    *("format", "app", "title", "when", "commit", "versions", "machine", "data", "settings", "rounds"),
    *("seconds", "candidates", "stages", "inference", "other_cores", "ratios", "verdict"),
}
# Hparams that switch on every stage of the loader's graph.
WHOLE = {
    "efficientdet": "image_size=64x96,hue=20,grid_mask_prob=0.5",
    "yolov4": "image_size=64x96,mosaic_prob=0.5,mixup_prob=0.5,letterbox=true",
}
STAGES = {
    "efficientdet": ["read", "decode", "resize", "augment", "normalize"],
    "yolov4": ["read", "decode", "resize", "color", "place", "mosaic"],
}


@pytest.fixture
def bench(app) -> options.BenchApp:
    return options.APPS[app.name]


def parse(bench: options.BenchApp, *arguments: str) -> BenchArgs:
    fv = flags.FlagValues()
    options.define_flags(fv)
    fv(["bench", f"--model_name={bench.model_name}", *arguments])
    return BenchArgs(**shared_flags.values(fv, options.define_flags))


def small(app, drawn: pathlib.Path, *arguments: str) -> list[str]:
    network = [f"--model_name={app.model_name}", f"--hparams={app.tiny}", "--image_size=64x96"]
    amount = ["--batch_size=4", "--prefetch=1", "--rounds=2", "--seconds=0.1"]
    return [*network, *amount, *coco_flags(drawn, "train"), *arguments]


def open_loader(bench, drawn, hparams: str):
    a = parse(bench, f"--model_name={bench.name}-nano", f"--hparams={hparams}")
    options = {"config": bench.make_config(a), "batch_size": 4, "training": True, "seed": 3}
    return bench.module("loaders").make_loader("dali_cpu", source=source_of(drawn), **options)


def source_of(directory: pathlib.Path):
    return open_source(str(directory / "images"), str(directory / "instances.json"))


def test_the_command_measures_processes(drawn, tmp_path):
    app = APPS["efficientdet"]
    baseline = f"--baseline=theirs={sys.executable} -uc {shlex.quote(BASELINE)}"
    arguments = small(app, drawn, "--what=data", "--pipeline_types=dali_cpu", "--rounds=1", baseline)
    arguments.append(f"--json={tmp_path}/new/bench.json")
    command = [sys.executable, ROOT / "tools" / "bench.py", app.name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert list(record["candidates"]) == ["data dali_cpu", "baseline theirs"]
    for (name, found), images in zip(record["candidates"].items(), (4, 3), strict=True):
        assert len(found["windows"]) == 1, (name, found)
        assert all(window["images"] % images == 0 for window in found["windows"])
        assert found["peak_bytes"] > 5e6 and name in done.stdout
    assert record["data"]["images"] == 12 and record["settings"]["image_size"] == [64, 96]
    assert record["machine"]["cores"] >= 1 and record["versions"]["tensorflow"]
    assert record["stages"] == record["inference"] == {}
    assert set(record) == KEYS


@pytest.mark.parametrize("name, role", [("efficientdet", "both:dali_cpu"), ("yolov4", "model")])
def test_a_candidate_trains(drawn, monkeypatch, name, role):
    app, bench = APPS[name], options.APPS[name]
    sizes, models, initial = [], [], {}

    def tell(advance, batch_size: int) -> None:
        sizes.append(batch_size)
        advance()
        advance()

    train = bench.module("train")

    def make_step(ranks, model, *rest, make=train.make_train_step, **options):
        models.append(model)
        initial.update({weight.path: weight.numpy() for weight in model.weights})
        return make(ranks, model, *rest, **options)

    monkeypatch.setattr(worker, "tell_steps", tell)
    monkeypatch.setattr(train, "make_train_step", make_step)
    a = parse(bench, *small(app, drawn, "--num_classes=3"))
    with eagerly():
        worker.work(bench, role, a)
    assert sizes == [4]
    (model,) = models
    moved = [np.any(weight.numpy() != initial[weight.path]) for weight in model.weights]
    assert np.mean(moved) > 0.9


def test_stages_are_one_line_of_json(app, bench, drawn, capfd):
    worker.work(bench, "stages:dali_cpu", parse(bench, *small(app, drawn)))
    line = capfd.readouterr().out.splitlines()[-1]
    found = {stage["stage"]: stage for stage in json.loads(line.removeprefix("result "))}
    assert list(found) == [*STAGES[app.name], "hand-over", "targets"]
    # Only `read` must be positive: the cost of a later stage is a difference, which noise can make negative.
    assert found["read"]["cpu_ms_per_image"]["median"] > 0
    assert "stages of dali_cpu" in report.stage_table("stages of dali_cpu", list(found.values()))


def operators(pipeline) -> set[str]:
    return {operator.name for operator in pipeline._ops}


def test_a_cut_graph_is_the_product_s_graph(app, bench, drawn):
    whole = open_loader(bench, drawn, WHOLE[app.name]).pipeline
    nodes = stages.stage_nodes(whole, bench.stages)
    assert list(nodes) == STAGES[app.name]
    cuts = {stage: stages.truncate_at(whole, each) for stage, each in nodes.items()}
    names = [set(), *(operators(cut) for cut in cuts.values()), operators(whole)]
    for smaller, larger in itertools.pairwise(names):
        assert smaller < larger
    images = np.stack([np.asarray(image) for image in cuts[STAGES[app.name][-1]].run()[0]])
    np.testing.assert_array_equal(images, whole.run()[0].as_array())
    jpegs = [bytes(np.asarray(jpeg)[:2]) for jpeg in cuts["read"].run()[0]]
    assert set(jpegs) <= {b"\xff\xd8", b"\x89P"}
    for stage, operator in (("decode", "ImageSlice"), ("resize", "Resize")):
        before = STAGES[app.name][STAGES[app.name].index(stage) - 1]
        assert any(operator in name for name in operators(cuts[stage]))
        assert not any(operator in name for name in operators(cuts[before]))


def test_cuts_of_mosaics_of_fresh_images(drawn):
    bench = options.APPS["yolov4"]
    whole = open_loader(bench, drawn, f"{WHOLE['yolov4']},mosaic_tiles=fresh").pipeline
    nodes = stages.stage_nodes(whole, bench.stages)
    cuts = {stage: stages.truncate_at(whole, each) for stage, each in nodes.items()}
    images = np.stack([np.asarray(image) for image in cuts["mosaic"].run()[0]])
    np.testing.assert_array_equal(images, whole.run()[0].as_array())
    assert len(nodes["read"]) == 4 * 4 and len(nodes["color"]) == 4
    assert operators(cuts["color"]) == operators(cuts["place"])
    names = operators(cuts["decode"])
    assert sum("ImageSlice" in name for name in names) == 4 and not any("Resize" in name for name in names)


def test_the_last_cut_is_what_training_gets(app, bench, drawn):
    loader = open_loader(bench, drawn, WHOLE[app.name])
    cuts = stages.cuts(loader, bench.stages)
    assert list(cuts) == [*STAGES[app.name], "hand-over", "targets"]
    expected, found = next(iter(loader.dataset())), cuts["targets"]()
    assert found[1].keys() == expected[1].keys()
    np.testing.assert_array_equal(found[0], expected[0])
    for name, value in expected[1].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)
    images, extra = cuts["hand-over"]()
    assert extra.keys() < expected[1].keys()
    np.testing.assert_array_equal(images, expected[0])


@one_app
def test_flags_that_cannot_be(bench, drawn):
    data = coco_flags(drawn, "train")
    for arguments, message in (
        (["--what=data,modle"], "unknown thing to measure 'modle': did you mean 'model'"),
        (["--what="], "nothing to measure"),
        (["--pipeline_types=synthetic"], "unknown loader 'synthetic'"),
        (["--baseline=python loader.py"], "is not NAME=COMMAND"),
        (["--baseline=a=x 'y"], "No closing quotation"),
        (["--baseline=a=x", "--baseline=a=y"], "another --baseline has this NAME"),
        (["--num_classes=1", *data], "data have 3 classes"),
        (["--batch_size=13", *data], "12 images, --batch_size=13"),
        (["--model_name=nona"], "unknown model"),
        ([data[0]], "is given without --train_annotations"),
    ):
        assert message in refusal(measuring.measure, bench, parse(bench, *arguments))


@one_app
def test_nothing_that_works_is_an_error(bench, capsys):
    a = parse(bench, "--what=", "--baseline=a=/no/such/program", "--rounds=1")
    assert "nothing could be measured" in refusal(measuring.measure, bench, a)
    assert "baseline a: failed: cannot be started" in capsys.readouterr().out


def test_data_are_drawn_once_where_none_are_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = measuring.draw(2)
    before = os.stat(directory / "instances.json").st_mtime_ns
    assert measuring.draw(2) == directory and len(list((directory / "images").iterdir())) == 2
    assert os.stat(directory / "instances.json").st_mtime_ns == before
    source = source_of(directory)
    sizes = source.annotations.image_sizes
    assert (sizes[:, 1] >= 640).all() and (sizes[:, 1] <= 1024).all()
    assert all(len(source.encoded(row)) > 90_000 for row in range(2))


def test_inference_is_measured_at_both_batch_sizes(app, bench, drawn, monkeypatch, capfd):
    asked = []

    def measure(loader, network, to_detections, label_map, a) -> dict:
        asked.append((loader, label_map))
        return {"batch_size": len(asked)}

    monkeypatch.setattr(stages, "measure_inference", measure)
    worker.work(bench, "inference:dali_cpu", parse(bench, *small(app, drawn)))
    line = capfd.readouterr().out.splitlines()[-1]
    assert [times["batch_size"] for times in json.loads(line.removeprefix("result "))] == [1, 2]
    for (loader, label_map), batch_size in zip(asked, (1, 4), strict=True):
        images, extra = next(iter(loader.dataset()))
        assert images.shape == (batch_size, 64, 96, 3) and set(extra) >= {"image_ids", "letterbox"}
        assert label_map.num_classes == 3
