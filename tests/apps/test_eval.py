"""Evaluation: the same bytes twice, both loaders, images in and original pixels out, refusals."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

from common.datacheck.datasets import explain, open_coco
from common.errors import UserError
from common.evaluation import coco_metrics, commands
from common.evaluation.evaluate import Evaluation, evaluate


def eval_flags(data):
    return [
        f"--eval_images={data}/images",
        f"--eval_annotations={data}/instances.json",
        "--pipeline_type=dali_cpu",
    ]


def test_evaluation_twice_gives_the_same_bytes(trained, drawn, command, tmp_path):
    for name in ("a", "b"):
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}/{name}", *eval_flags(drawn))
    for name in ("metrics.json", "detections.json", "pr_curves.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    # and what training itself found with these averaged weights
    best = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert best["AP"] == pytest.approx(max(float(r["AP"]) for r in _rows(trained)), abs=1e-5)


def test_faster_coco_eval_gives_the_same_bytes(trained, drawn, command, tmp_path):
    pytest.importorskip("faster_coco_eval", reason="the extra faster-coco is not installed")
    for name in ("pycocotools", "faster"):
        flags = [f"--output_dir={tmp_path}/{name}", f"--coco_backend={name}"]
        command("eval", f"--weights={trained}", *flags, *eval_flags(drawn))
    for name in ("metrics.json", "detections.json"):
        files = [tmp_path / backend / name for backend in ("pycocotools", "faster")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_missing_backend_is_said_before_the_work(command, drawn, monkeypatch):
    monkeypatch.setattr(coco_metrics, "FASTER_VERSION", "0.0")
    with pytest.raises(UserError, match=r"pip install faster-coco-eval==0\.0"):
        command("eval", "--weights=no such file", "--coco_backend=faster", *eval_flags(drawn))


def _rows(directory):
    import csv

    with (directory / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_plain_loader_finds_the_same(trained, drawn, command, tmp_path):
    """Boxes may move by the one level that resizing differs by; they are the same detections."""
    for name in ("dali_cpu", "tensorflow"):
        arguments = [*eval_flags(drawn)[:2], f"--pipeline_type={name}", "--batch_size=5"]
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}/{name}", *arguments)
    ours, theirs = (
        json.loads((tmp_path / name / "detections.json").read_text()) for name in ("dali_cpu", "tensorflow")
    )
    assert {d["image_id"] for d in ours} == {d["image_id"] for d in theirs}
    top = max(ours, key=lambda d: d["score"])
    rival = [d for d in theirs if d["image_id"] == top["image_id"]]
    assert min(np.abs(np.subtract(top["bbox"], d["bbox"])).max() for d in rival) < 2.0


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_every_image_exactly_once(app, trained, drawn, batch_size):
    """Twelve images in batches of five: the repeats at the end must not count."""
    model, config, labels, _ = app.load_trained(trained)
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    loader = app.make_loader(
        "dali_cpu",
        source=source,
        config=config,
        batch_size=batch_size,
        training=False,
        with_targets=False,
    )
    results = evaluate(app.make_detect(model, config), loader, labels, explain=explain).results
    keys = [(r["image_id"], r["category_id"], tuple(r["bbox"]), r["score"]) for r in results]
    assert len(keys) == len(set(keys))
    assert {r["image_id"] for r in results} <= set(source.annotations.image_ids.tolist())
    per_image = np.unique([r["image_id"] for r in results], return_counts=True)[1]
    assert per_image.max() <= config.max_detections


def test_detections_are_original_pixels_and_category_ids(trained, drawn, command, tmp_path):
    command("eval", f"--weights={trained}", f"--output_dir={tmp_path}", *eval_flags(drawn))
    truth = json.loads((drawn / "instances.json").read_text())
    sizes = {image["id"]: (image["width"], image["height"]) for image in truth["images"]}
    results = json.loads((tmp_path / "detections.json").read_text())
    assert results
    for result in results:
        width, height = sizes[result["image_id"]]
        x, y, w, h = result["bbox"]
        assert result["category_id"] in (3, 17, 90)
        assert -0.01 <= x <= x + w <= width + 0.01
        assert -0.01 <= y <= y + h <= height + 0.01


def test_truth_fed_back_is_ap_one(coco128):
    source = open_coco(str(coco128 / "images"), str(coco128 / "instances.json"))
    truth = source.annotations.ground_truth()
    perfect = [
        {"image_id": a["image_id"], "category_id": a["category_id"], "bbox": a["bbox"], "score": 1.0}
        for a in truth["annotations"]
        if not a["iscrowd"]
    ]
    metrics = coco_metrics.score(truth, perfect).metrics
    assert metrics["AP"] == pytest.approx(1.0)
    assert metrics["AP50"] == pytest.approx(1.0)


def test_other_nms_and_another_size_by_flag(app, trained, drawn, command, tmp_path):
    metrics = command(
        "eval",
        f"--weights={trained}",
        f"--output_dir={tmp_path}",
        f"--hparams=nms_method={app.other_nms}",
        "--image_size=96x128",
        *eval_flags(drawn),
    )
    assert 0.0 <= metrics["AP"] <= 1.0


def test_other_categories_are_refused(trained, drawn, command, tmp_path):
    data = tmp_path / "renamed"
    shutil.copytree(drawn, data)
    document = json.loads((data / "instances.json").read_text())
    next(c for c in document["categories"] if c["id"] == 17)["name"] = "giraffe"
    (data / "instances.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"17.*giraffe"):
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}/out", *eval_flags(data))


def test_what_was_trained_cannot_be_changed_by_hparams(app, trained, drawn, command):
    """Other anchors would load without a word and decode every box wrongly."""
    name, value = app.own_hparam
    with pytest.raises(UserError, match=rf"'{name}' cannot be changed here.*nms_method"):
        command("eval", f"--weights={trained}", f"--hparams={name}={value}", *eval_flags(drawn))


def test_noise_is_not_evaluated(trained, drawn, command):
    with pytest.raises(UserError, match="synthetic"):
        command("eval", f"--weights={trained}", *eval_flags(drawn)[:2], "--pipeline_type=synthetic")


def test_an_output_directory_that_cannot_be_made_is_said_before_the_work(trained, drawn, command, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output_dir=.*file"):
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}/file/x", *eval_flags(drawn))


def test_a_full_disk_is_one_line_and_earlier_results_stand(trained, drawn, command, tmp_path, monkeypatch):
    (tmp_path / "detections.json").write_text("earlier")
    found = Evaluation({**dict.fromkeys(coco_metrics.NAMES, 0.5), "per_class": {}}, [], {})
    monkeypatch.setattr(commands, "evaluate", lambda *_, **__: found)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"^--output_dir=.*: No space left on device$"):
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}", *eval_flags(drawn))
    assert (tmp_path / "detections.json").read_text() == "earlier"


@pytest.mark.parametrize("content", [None, b"", b"no weights at all" * 99])
def test_bad_weights_are_one_line(command, drawn, tmp_path, content):
    weights = tmp_path / "x.weights.h5"
    if content is not None:
        weights.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.weights\.h5"):
        command("eval", f"--weights={weights}", *eval_flags(drawn))


def test_a_network_that_gives_nan_is_an_error_not_a_score(app, trained, drawn):
    model, config, labels, _ = app.load_trained(trained)
    bias = [weight for weight in model.weights if weight.path.endswith("/bias")][-1]  # of the last layer
    bias.assign(np.full(bias.shape, np.nan))
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    loader = app.make_loader(
        "dali_cpu", source=source, config=config, batch_size=4, training=False, with_targets=False
    )
    with pytest.raises(UserError, match=r"image 10 is not finite"):
        evaluate(app.make_detect(model, config), loader, labels, explain=explain)
