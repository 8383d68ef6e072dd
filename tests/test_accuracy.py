"""Runs benchmarks/accuracy.py with programs that write detections instead of training."""

import json
import re
import subprocess
import sys

import yaml
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.accuracy import AccuracyArgs, compare, mean_and_interval
from benchmarks.accuracy_data import DataArgs, write_data_set
from tests.conftest import ROOT

STUB = """
import json, pathlib, sys
truth = json.loads(pathlib.Path(sys.argv[1], "annotations/instances_val2017.json").read_bytes())
rows = [{key: row[key] for key in ("image_id", "category_id", "bbox")} for row in truth["annotations"]]
for i, row in enumerate(rows):  # the higher the score, the worse the box
    row["score"], row["bbox"][2] = i / len(rows), row["bbox"][2] * (1 + i / len(rows))
pathlib.Path(sys.argv[2], "detections.json").write_text(json.dumps(rows))
"""


def test_accuracy_benchmark_resumes_at_the_failed_seed_and_its_ap_equals_pycocotools(tmp_path, drawn, capsys):
    images, annotations, data = str(drawn / "images"), str(drawn / "instances.json"), tmp_path / "data/drawn"
    write_data_set(DataArgs(str(data), images, annotations, images, annotations))
    stems = [
        [file.stem for file in sorted((data / kind / "val2017").iterdir())] for kind in ("images", "labels")
    ]
    assert stems[0] == stems[1]

    (tmp_path / "stub.py").write_text(STUB)
    train = f"echo {{seed}} >> {tmp_path}/seeds; test {{seed}} = 1 || test -e {tmp_path}/second"
    stub = {"train": train, "detect": f"{{python}} {tmp_path}/stub.py {{data}} {{run}}"}
    row = {"title": "Stubs", "budget": {"cpu": 60}, "settings": {}, "data": {"drawn": {}}}
    row["programs"] = {"stub": stub, "absent": stub | {"needs": "/absent"}}
    (tmp_path / "rows.yaml").write_text(yaml.dump({"row": row}))
    a = AccuracyArgs(seeds="1,2", table=str(tmp_path / "rows.yaml"), output_dir=str(tmp_path))
    assert compare(a) == 1
    assert "/absent does not exist" in capsys.readouterr().err
    (tmp_path / "second").touch()
    assert compare(a) == 1
    assert (tmp_path / "seeds").read_text().split() == ["1", "2", "2"]

    record = json.loads((tmp_path / "row/drawn/stub/2/result.json").read_bytes())
    truth = COCO(str(data / "annotations/instances_val2017.json"))
    detections = truth.loadRes(str(tmp_path / "row/drawn/stub/2/detections.json"))
    evaluation = COCOeval(truth, detections, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert abs(record["metrics"]["AP"] - evaluation.stats[0]) < 1e-12
    assert 0.2 < evaluation.stats[0] < 0.9
    assert "| drawn | stub |" in capsys.readouterr().out
    assert mean_and_interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"


def test_scripts_of_other_programs_that_the_rows_name_exist():
    names = re.findall(r"benchmarks/programs/\w+\.py", (ROOT / "benchmarks/accuracy.yaml").read_text())
    assert len(names) == 2 and all((ROOT / name).exists() for name in names)


def test_deeppcb_script_writes_boxes_and_file_names_of_both_splits(tmp_path):
    data = tmp_path / "peers/DeepPCB/PCBData"
    data.mkdir(parents=True)
    for name in ("trainval.txt", "test.txt"):
        (data / name).write_text("a/1.jpg boxes.txt\n")
    (data / "boxes.txt").write_text("10 20 40 60 3\n")
    subprocess.run([sys.executable, ROOT / "benchmarks/programs/deeppcb.py"], cwd=tmp_path, check=True)
    for split in ("train", "eval"):
        coco = COCO(str(data / f"instances_{split}.json"))
        assert coco.loadImgs(1)[0]["file_name"] == "a/1_test.jpg"
        (box,) = coco.loadAnns(coco.getAnnIds())
        assert (box["bbox"], coco.cats[box["category_id"]]["name"]) == ([10, 20, 30, 40], "mousebite")


def test_automl_script_writes_detections_instead_of_metrics(tmp_path):
    (tmp_path / "tf2").mkdir()
    (tmp_path / "coco_metric.py").write_text("class EvaluationMetric: pass")
    (tmp_path / "tf2/eval.py").write_text(
        "from coco_metric import EvaluationMetric\n"
        "metric = EvaluationMetric()\n"
        "metric.detections, metric.metric_names = [[7, 1, 2, 3, 4, 0.5, 9]], ['AP']\n"
        "assert metric.evaluate().tolist() == [-1]\n"
    )
    script, output = ROOT / "benchmarks/programs/automl_detect.py", tmp_path / "detections.json"
    subprocess.run([sys.executable, script], cwd=tmp_path, env={"OUTPUT": str(output)}, check=True)
    row = {"image_id": 7, "category_id": 9, "bbox": [1, 2, 3, 4], "score": 0.5}
    assert json.loads(output.read_text()) == [row]
