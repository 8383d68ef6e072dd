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
ALL_STAGES = {
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


def small_flags(app, drawn: pathlib.Path, *arguments: str) -> list[str]:
    network = [f"--model_name={app.model_name}", f"--hparams={app.tiny}", "--image_size=64x96"]
    amount = ["--batch_size=4", "--prefetch=1", "--rounds=2", "--seconds=0.1"]
    return [*network, *amount, *coco_flags(drawn, "train"), *arguments]


def open_loader(bench, drawn, hparams: str):
    a = parse(bench, f"--model_name={bench.name}-nano", f"--hparams={hparams}")
    options = {"config": bench.make_config(a), "batch_size": 4, "training": True, "seed": 3}
    return bench.module("loaders").make_loader("dali_cpu", source=source_of(drawn), **options)


def source_of(directory: pathlib.Path):
    return open_source(str(directory / "images"), str(directory / "instances.json"))


def test_benchmark_command_measures_loader_and_baseline_processes_and_writes_json(drawn, tmp_path):
    app = APPS["efficientdet"]
    baseline = f"--baseline=theirs={sys.executable} -uc {shlex.quote(BASELINE)}"
    arguments = small_flags(app, drawn, "--what=data", "--pipeline_types=dali_cpu", "--rounds=1", baseline)
    arguments.append(f"--json={tmp_path}/new/bench.json")
    command = [sys.executable, ROOT / "tools" / "bench.py", app.name, *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    record = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert list(record["candidates"]) == ["data dali_cpu", "baseline theirs"]
    for (name, result), images in zip(record["candidates"].items(), (4, 3), strict=True):
        (window,) = result["windows"]
        assert window["images"] % images == 0
        assert result["peak_bytes"] > 5e6 and name in process.stdout
    assert record["data"]["images"] == 12 and record["settings"]["image_size"] == [64, 96]
    assert record["machine"]["cores"] >= 1 and record["versions"]["tensorflow"]
    assert record["stages"] == record["inference"] == {}
    assert set(record) == KEYS


@pytest.mark.parametrize("name, role", [("efficientdet", "both:dali_cpu"), ("yolov4", "model")])
def test_training_step_that_the_benchmark_measures_changes_the_weights_of_the_model(
    drawn, monkeypatch, name, role
):
    app, bench = APPS[name], options.APPS[name]
    sizes, models, initial = [], [], {}

    def take_two_steps(advance, batch_size: int) -> None:
        sizes.append(batch_size)
        advance()
        advance()

    train = bench.module("train")

    def make_step(ranks, model, *rest, make=train.make_train_step, **options):
        models.append(model)
        initial.update({weight.path: weight.numpy() for weight in model.weights})
        return make(ranks, model, *rest, **options)

    monkeypatch.setattr(worker, "tell_steps", take_two_steps)
    monkeypatch.setattr(train, "make_train_step", make_step)
    a = parse(bench, *small_flags(app, drawn, "--num_classes=3"))
    with eagerly():
        worker.work(bench, role, a)
    assert sizes == [4]
    (model,) = models
    moved = [np.any(weight.numpy() != initial[weight.path]) for weight in model.weights]
    assert np.mean(moved) > 0.9


@one_app
def test_benchmark_worker_writes_the_stages_of_a_loader_as_one_line_of_json(app, bench, drawn, capfd):
    worker.work(bench, "stages:dali_cpu", parse(bench, *small_flags(app, drawn)))
    line = capfd.readouterr().out.splitlines()[-1]
    results = {stage["stage"]: stage for stage in json.loads(line.removeprefix("result "))}
    assert list(results) == [*STAGES[app.name], "hand-over", "targets"]
    # Only `read` must be positive: the cost of a later stage is a difference, which noise can make negative.
    assert results["read"]["cpu_ms_per_image"]["median"] > 0
    assert "stages of dali_cpu" in report.stage_table("stages of dali_cpu", list(results.values()))


def operators(pipeline) -> set[str]:
    return {operator.name for operator in pipeline._ops}


def test_dali_graphs_cut_after_each_benchmark_stage_grow_to_the_graph_of_the_loader(app, bench, drawn):
    pipeline = open_loader(bench, drawn, ALL_STAGES[app.name]).pipeline
    nodes = stages.stage_nodes(pipeline, bench.stages)
    assert list(nodes) == STAGES[app.name]
    cuts = {stage: stages.truncate_at(pipeline, outputs) for stage, outputs in nodes.items()}
    names = [set(), *(operators(cut) for cut in cuts.values()), operators(pipeline)]
    for smaller, larger in itertools.pairwise(names):
        assert smaller < larger
    images = np.stack([np.asarray(image) for image in cuts[STAGES[app.name][-1]].run()[0]])
    np.testing.assert_array_equal(images, pipeline.run()[0].as_array())
    jpegs = [bytes(np.asarray(jpeg)[:2]) for jpeg in cuts["read"].run()[0]]
    assert set(jpegs) <= {b"\xff\xd8", b"\x89P"}
    for previous, stage, operator in (("read", "decode", "ImageSlice"), ("decode", "resize", "Resize")):
        assert any(operator in name for name in operators(cuts[stage]))
        assert not any(operator in name for name in operators(cuts[previous]))


def test_dali_graphs_cut_from_a_fresh_mosaic_read_and_decode_four_images(drawn):
    bench = options.APPS["yolov4"]
    pipeline = open_loader(bench, drawn, f"{ALL_STAGES['yolov4']},mosaic_tiles=fresh").pipeline
    nodes = stages.stage_nodes(pipeline, bench.stages)
    cuts = {stage: stages.truncate_at(pipeline, outputs) for stage, outputs in nodes.items()}
    images = np.stack([np.asarray(image) for image in cuts["mosaic"].run()[0]])
    np.testing.assert_array_equal(images, pipeline.run()[0].as_array())
    assert len(nodes["read"]) == 4 * 4 and len(nodes["color"]) == 4
    assert operators(cuts["color"]) == operators(cuts["place"])
    names = operators(cuts["decode"])
    assert sum("ImageSlice" in name for name in names) == 4 and not any("Resize" in name for name in names)


def test_benchmark_stage_hand_over_gives_the_images_of_a_batch_and_stage_targets_all_of_it(app, bench, drawn):
    loader = open_loader(bench, drawn, ALL_STAGES[app.name])
    cuts = stages.cuts(loader, bench.stages)
    assert list(cuts) == [*STAGES[app.name], "hand-over", "targets"]
    expected_images, expected_targets = next(iter(loader.dataset()))
    images, targets = cuts["targets"]()
    assert targets.keys() == expected_targets.keys()
    np.testing.assert_array_equal(images, expected_images)
    for name, value in expected_targets.items():
        np.testing.assert_array_equal(targets[name], value, err_msg=name)
    images, extra = cuts["hand-over"]()
    assert extra.keys() < expected_targets.keys()
    np.testing.assert_array_equal(images, expected_images)


REFUSED = {
    "misspelt part": (["--what=data,modle"], "unknown thing to measure 'modle': did you mean 'model'"),
    "no part": (["--what="], "nothing to measure"),
    "unknown loader": (["--pipeline_types=synthetic"], "unknown loader 'synthetic'"),
    "baseline without a name": (["--baseline=python loader.py"], "is not NAME=COMMAND"),
    "open quotation": (["--baseline=a=x 'y"], "No closing quotation"),
    "two baselines of one name": (["--baseline=a=x", "--baseline=a=y"], "another --baseline has this NAME"),
    "too few classes": (["--num_classes=1", *coco_flags("{data}", "train")], "data have 3 classes"),
    "too few images": (["--batch_size=13", *coco_flags("{data}", "train")], "12 images, --batch_size=13"),
    "unknown model": (["--model_name=nona"], "unknown model"),
    "no annotations": (["--train_images={data}/images"], "is given without --train_annotations"),
}


@one_app
@pytest.mark.parametrize("case", REFUSED)
def test_benchmark_refuses_invalid_flags_with_a_one_line_message(bench, drawn, case):
    arguments, message = REFUSED[case]
    a = parse(bench, *(argument.format(data=drawn) for argument in arguments))
    assert message in refusal(measuring.measure, bench, a)


@one_app
def test_benchmark_ends_with_an_error_if_its_only_baseline_cannot_be_started(bench, capsys):
    a = parse(bench, "--what=", "--baseline=a=/no/such/program", "--rounds=1")
    assert "not measured: baseline a." in refusal(measuring.measure, bench, a)
    assert "baseline a: failed: cannot be started" in capsys.readouterr().out


def test_synthetic_images_for_the_benchmark_are_made_once_and_have_at_least_90_kilobytes(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = measuring.draw(2)
    time = os.stat(directory / "instances.json").st_mtime_ns
    assert measuring.draw(2) == directory and len(list((directory / "images").iterdir())) == 2
    assert os.stat(directory / "instances.json").st_mtime_ns == time
    source = source_of(directory)
    sizes = source.annotations.image_sizes
    assert (sizes[:, 1] >= 640).all() and (sizes[:, 1] <= 1024).all()
    assert all(len(source.encoded(row)) > 90_000 for row in range(2))


def test_benchmark_measures_inference_with_batch_size_1_and_with_that_of_the_batch_size_flag(
    app, bench, drawn, monkeypatch, capfd
):
    calls = []

    def measure(loader, network, to_detections, label_map, a) -> dict:
        calls.append((loader, label_map))
        return {"batch_size": len(calls)}

    monkeypatch.setattr(stages, "measure_inference", measure)
    worker.work(bench, "inference:dali_cpu", parse(bench, *small_flags(app, drawn)))
    line = capfd.readouterr().out.splitlines()[-1]
    assert [times["batch_size"] for times in json.loads(line.removeprefix("result "))] == [1, 2]
    for (loader, label_map), batch_size in zip(calls, (1, 4), strict=True):
        images, extra = next(iter(loader.dataset()))
        assert images.shape == (batch_size, 64, 96, 3) and set(extra) >= {"image_ids", "letterbox"}
        assert label_map.num_classes == 3
