"""Runs benchmarks/accuracy.py with programs that write detections instead of training."""

import json

import yaml
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.accuracy import AccuracyArgs, compare, mean_and_interval
from benchmarks.accuracy_data import DataArgs, write_data_set

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
