"""The cases that tools/gpu_check.py runs. No case ever ran on a GPU."""

import csv
import functools
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from tools.benchmark import report
from tools.gpu_checks import parts
from tools.gpu_checks.running import ROOT, Case

DALI_ALONE = ("facts", "decoding", "graphs", "loading")
STAGES = (*DALI_ALONE, "tests", "training", "nccl", "evaluation", "exports")
LOADS = (0.0, 0.3, 0.45, 0.65, 1.0)
# app -> model, side of its square input in pixels, batch size
MODELS = {"efficientdet": ("efficientdet-d0", 512, 64), "yolov4": ("yolov4", 608, 16)}
# (--precision, --xla, factor by which the batch size is multiplied)
ARITHMETIC = (
    *itertools.product(("float32", "mixed_bfloat16", "mixed_float16"), (False, True), (1,)),
    ("mixed_bfloat16", True, 2),
)
SHORT = {"epochs": 2, "steps_per_epoch": 60, "save_every": 0, "eval_every": 0}
COMPILING = 1800.0  # seconds: time limit if XLA or TensorRT compiles


def all_cases(output: pathlib.Path, images: str, annotations: str, gpus: int, cores: int) -> list[Case]:
    """Returns all cases, sorted by stage.

    Args:
        output: absolute path of the directory that contains hosts.sh and the synthetic data (kinds/, train/
            and eval/).
        images, annotations: directory of photographs and their COCO json, for measurements of speed.
        gpus: number of GPUs. Cases with two processes need two.
        cores: number of CPU cores.
    """
    photos = {"images": images, "annotations": annotations}
    cases = [part("facts", "facts"), part("training", "tensorflow"), part("nccl", "nccl"), *_gpu_tests()]
    for load, roi in itertools.product(LOADS, (False, True)):
        cases.append(part("decoding", "decode", load=load, roi=roi, **photos))
    for app in MODELS:
        cases += [*_dali_alone(app, output, photos, cores), *_bench(app, output, photos)]
        cases += [*_train(app, output, photos, gpus), *_trained(app, output), *_exports(app, output)]
    return sorted(cases, key=lambda case: STAGES.index(case.stage))


def part(stage: str, what: str, **options: Any) -> Case:
    """Returns a case that runs a function of parts.py."""
    about = {name: value for name, value in options.items() if "/" not in str(value)}
    command = python("-m", "tools.gpu_checks.parts", what, json.dumps(options))
    return Case(stage, {"what": what, **about}, command, limit=300.0)


def python(*words: object, **flags: Any) -> list[str]:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in flags.items()}
    return [sys.executable, *map(str, words), *(f"--{name}={value}" for name, value in values.items())]


def _gpu_tests() -> Iterator[Case]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "@pytest.mark.gpu" in path.read_text():
            command = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", path)
            yield Case("tests", {"file": str(path.relative_to(ROOT))}, command, _passed)


def _passed(output: str) -> dict[str, Any]:
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", output)}
    return counts if "passed" in counts else {"error": "no test ran: DALI sees no GPU"}


def _dali_alone(app: str, output: pathlib.Path, photos: dict, cores: int) -> Iterator[Case]:
    kinds = {"images": f"{output}/kinds/images", "annotations": f"{output}/kinds/instances.json"}
    fresh: list[dict] = [{"hparams": "mosaic_tiles=fresh"}] if app == "yolov4" else []
    training = [{"training": True, **more} for more in ({}, *fresh)]
    for options in ({"training": False}, *training, {"training": False, "roi_decoding": True}):
        yield part("graphs", "compare", app=app, **options, **kinds)
    batch = MODELS[app][2]
    sizes = [(threads, batch) for threads in sorted({2, max(cores // 2, 1), cores})]
    for threads, size in (*sizes, (cores, batch // 4), (cores, batch * 2)):
        yield part("loading", "rate", app=app, num_threads=threads, batch_size=size, **photos)
    for more in ({"roi_decoding": True}, *fresh):
        yield part("loading", "rate", app=app, num_threads=cores, batch_size=batch, **more, **photos)


def _bench(app: str, output: pathlib.Path, photos: dict) -> Iterator[Case]:
    model, _, batch = MODELS[app]
    data = {f"train_{name}": value for name, value in photos.items()}
    for what, choices in (("model", ARITHMETIC), ("data,model,both", ARITHMETIC[2:4])):
        for precision, xla, factor in choices:
            flags = {"what": what, "precision": precision, "xla": xla, "batch_size": factor * batch}
            path = output / f"{app}-{'-'.join(map(str, flags.values()))}.json"
            more = {"model_name": model, "pipeline_types": "dali_gpu", "rounds": 1, "json": path}
            command = python("tools/bench.py", app, **flags, **more, **data)
            yield Case("training", {"app": app, **flags}, command, functools.partial(_rates, path), COMPILING)


def _rates(path: pathlib.Path, _: str) -> dict[str, Any]:
    record = json.loads(path.read_bytes())
    good = report.succeeded(record["candidates"])
    found = {
        name.partition(" ")[0]: round(each["images_per_second"]["median"], 1) for name, each in good.items()
    }
    errors = [each["error"] for name, each in record["candidates"].items() if name not in good]
    return found | {"verdict": " ".join(record["verdict"])} | ({"error": errors[0]} if errors else {})


def _train(app: str, output: pathlib.Path, photos: dict, gpus: int) -> Iterator[Case]:
    model, _, batch = MODELS[app]
    data = {f"train_{name}": value for name, value in photos.items()} | SHORT
    if app == "yolov4":
        data |= {"hparams": "multi_scale=1"}  # one image size, so XLA compiles once
    bfloat16 = data | {"model_name": model, "batch_size": batch, "precision": "mixed_bfloat16"}
    nano = data | {"model_name": f"{app}-nano", "batch_size": 8}
    runs: dict[str, dict] = {
        "demo": {"flagfile": f"{app}/flags/demo.txt", **_split(output, "train"), **_split(output, "eval")},
        "bfloat16": bfloat16,
        "bfloat16-xla": bfloat16 | {"xla": True},
        "float16-large": bfloat16 | {"precision": "mixed_float16", "batch_size": 2 * batch},
        "mirrored": nano | {"strategy": "mirrored"},
        "horovod": nano | {"strategy": "horovod"},
        "two-gpus": bfloat16 | {"strategy": "horovod"},
    }
    processes = {"horovod": ["1"], "two-gpus": ["2"]}
    for name, flags in runs.items():
        directory = output / f"{app}-{name}"
        command = python(f"{app}/train.py", **flags, output_dir=directory, overwrite=True)
        if name in processes:
            horovodrun = pathlib.Path(sys.executable).with_name("horovodrun")
            command = [str(horovodrun), "-np", *processes[name], *command]
        about = {"app": app, "what": "train.py", "run": name}
        read = functools.partial(_with_nccl if name == "two-gpus" else _last_epoch, directory)
        missing = "this host has one GPU" if name == "two-gpus" and gpus < 2 else ""
        yield Case("nccl" if name == "two-gpus" else "training", about, command, read, COMPILING, missing)


def _split(output: pathlib.Path, name: str) -> dict[str, str]:
    place = f"{output}/{name}"
    return {f"{name}_images": f"{place}/images", f"{name}_annotations": f"{place}/instances.json"}


def _last_epoch(directory: pathlib.Path, _: str) -> dict[str, Any]:
    last = list(csv.DictReader((directory / "results.csv").read_text().splitlines()))[-1]
    names = ("images_per_second", "loss", "skipped_steps", "AP")
    return {name: round(float(last[name]), 4) for name in names if last.get(name)}


def _with_nccl(directory: pathlib.Path, output: str) -> dict[str, Any]:
    return _last_epoch(directory, output) | parts.nccl()


def _trained(app: str, output: pathlib.Path) -> Iterator[Case]:
    weights, drawn = f"{output}/{app}-demo", f"{output}/eval"
    for pipeline_type in ("dali_gpu", "dali_cpu"):
        yield _evaluate("evaluation", app, output, weights, pipeline_type=pipeline_type)
    files = {"images": f"{drawn}/images", "annotations": f"{drawn}/instances.json"}
    program = f"{app}/infer.py"
    command = python(program, weights=weights, output_dir=output / f"{app}-pictures", **files)
    yield Case("evaluation", {"program": program}, command, lambda _: {})


def _evaluate(stage: str, app: str, output: pathlib.Path, weights: str, **flags: str) -> Case:
    about = {"app": app, "what": "AP", "file": pathlib.Path(weights).name, **flags}
    directory = output / f"metrics-{'-'.join(about.values())}"
    more = {"weights": weights, "output_dir": directory, **_split(output, "eval"), **flags}
    return Case(stage, about, python(f"{app}/eval.py", **more), functools.partial(_metrics, directory))


def _metrics(directory: pathlib.Path, _: str) -> dict[str, Any]:
    metrics = json.loads((directory / "metrics.json").read_bytes())
    return {name: round(metrics[name], 4) for name in ("AP", "AP50")}


def _exports(app: str, output: pathlib.Path) -> Iterator[Case]:
    for run, quantize in itertools.product(("demo", "bfloat16"), ("none", "fp16", "int8")):
        kind, suffix = ("onnx", ".onnx") if quantize == "none" else ("tensorrt", ".plan")
        file = f"{output}/{app}-{run}-{quantize}{suffix}"
        flags = {"weights": f"{output}/{app}-{run}", "format": kind, "quantize": quantize, "output": file}
        if quantize == "int8":
            flags["calibration_images"] = f"{output}/train/images"
        about = {"app": app, "what": "write", "file": pathlib.Path(file).name}
        yield Case("exports", about, python(f"{app}/export.py", **flags), lambda _: {}, COMPILING)
        if run == "demo":
            yield _evaluate("exports", app, output, file)
        else:
            case = part("exports", "latency", file=file, side=MODELS[app][1])
            yield case._replace(about=about | {"what": "time"})
