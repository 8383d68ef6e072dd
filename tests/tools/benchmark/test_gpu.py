"""Tests bench.py gpu with small programs instead of its candidates. The candidates never ran on a GPU."""

import json
import sys

import pytest
import tensorflow as tf
from absl import flags

from common import args
from tests.refusal import refusal
from tools import bench
from tools.benchmark import exports, gpu, measuring, report
from tools.benchmark.gpu import BOTH, EVALUATION, LOADER, STEP, TF_DATA, Row
from tools.benchmark.options import BenchArgs, define_flags
from tools.benchmark.rounds import Command

LOADS = (0.0, 0.3, 1.0)  # values of --hw_decoder_load
ROWS = [Row("yolov4", LOADER, {"hw_decoder_load": load}) for load in LOADS[:2]]
ROWS.append(Row("yolov4", EVALUATION, {"hw_decoder_load": 1.0}))
TIMES = [{"batch_size": 8, "latency_ms": 640.0, "images_per_second": 12.5}]


class Measurement:
    """Measures ROWS into a json file.

    `programs` are the candidates, or None for an interrupt. `started` lists the rows of the last run.
    """

    def __init__(self, path):
        self.path, self.started = path, []
        self.programs = dict.fromkeys(LOADS, "print('ready')\nwhile True: time.sleep(0.001); print('step 4')")
        self.programs[1.0] = f"print('result', {json.dumps(json.dumps(TIMES))})"

    def command(self, app, role, a) -> Command:
        self.started.append(a.hw_decoder_load)
        program = self.programs[a.hw_decoder_load]
        if program is None:
            raise KeyboardInterrupt
        return Command("", [sys.executable, "-uc", f"import sys, time\n{program}"])

    def run(self, **options) -> None:
        self.started.clear()
        gpu.measure(BenchArgs(json=str(self.path), rounds=1, seconds=0.05, **options))

    @property
    def results(self) -> dict:
        record = json.loads(self.path.read_text())
        return record["candidates"] | record["inference"]


@pytest.fixture
def measurement(monkeypatch, tmp_path):
    measurement = Measurement(tmp_path / "gpu.json")
    monkeypatch.setattr(gpu, "gpu_visible", lambda: True)
    monkeypatch.setattr(gpu, "_checked", lambda app, a: a)
    monkeypatch.setattr(gpu, "all_rows", lambda cores, gpus: ROWS)
    monkeypatch.setattr(exports, "missing", lambda export_format: "")
    monkeypatch.setattr(measuring, "command", measurement.command)
    return measurement


def test_failed_row_of_gpu_benchmark_is_reported_and_repeated_by_the_next_run(measurement, capsys):
    good, measurement.programs[0.3] = measurement.programs[0.3], "sys.exit('error: no such data')"
    measurement.run()
    assert measurement.started == list(LOADS)
    assert list(measurement.results) == [row.name for row in ROWS]
    first, second, times = measurement.results.values()
    assert "error" not in first and second == {"error": "exit code 1: no such data"} and times == TIMES
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{ROWS[1].name}: failed: exit code 1: no such data"
    assert [line.partition(" --")[0] for line in lines if " --hw_decoder_load=" in line] == [
        "| yolov4 data:dali_gpu",
        "| yolov4 inference:dali_gpu",
    ]
    assert f"| {ROWS[2].name} --batch_size=8 | 12.5 | 640 | | |" in lines

    measurement.programs[0.3] = good
    measurement.run()
    assert measurement.started == [0.3] and "error" not in measurement.results[ROWS[1].name]
    assert report.compare(str(measurement.path), str(measurement.path)).count(": images/s") == 2
    assert "was written with other flags" in refusal(measurement.run, seed=1)


def test_gpu_benchmark_measures_exports_and_names_a_missing_package_once(measurement, monkeypatch, capsys):
    rows = [ROWS[0], *(Row("yolov4", role, {}) for role in exports.ROLES)]
    problems = {"onnx": "", "tensorrt": "TensorRT is missing"}
    monkeypatch.setattr(gpu, "all_rows", lambda cores, gpus: rows)
    monkeypatch.setattr(exports, "missing", problems.__getitem__)
    measurement.programs[BenchArgs().hw_decoder_load] = measurement.programs[1.0]
    measurement.run()
    assert list(measurement.results) == [rows[0].name, "yolov4 export:onnx:none"]
    *lines, fastest, missing = capsys.readouterr().out.splitlines()
    assert "| yolov4 export:onnx:none --batch_size=8 | 12.5 | 640 | | |" in lines
    assert fastest == "yolov4: fastest export at batch 8: onnx:none, 640 ms per batch."
    assert missing == "TensorRT is missing" not in lines


def test_interrupted_gpu_benchmark_leaves_its_first_rows_in_the_json(measurement):
    measurement.programs[1.0] = None
    with pytest.raises(KeyboardInterrupt):
        measurement.run()
    assert list(measurement.results) == [row.name for row in ROWS[:2]]


def test_gpu_benchmark_without_a_successful_row_ends_with_an_error(measurement):
    measurement.programs = dict.fromkeys(LOADS, "sys.exit('error: no such data')")
    assert "nothing could be measured" in refusal(measurement.run)


def test_gpu_benchmark_refuses_flags_that_its_rows_set_and_a_missing_json_flag(measurement):
    assert "omit --batch_size: the measurement itself sets it" in refusal(measurement.run, batch_size=4)
    assert "omit --xla" in refusal(measurement.run, xla=True)
    assert "--json=FILE is missing" in refusal(gpu.measure, BenchArgs(baseline=[]))


def test_gpu_benchmark_without_a_gpu_is_refused(monkeypatch, tmp_path):
    flag_values = flags.FlagValues()
    define_flags(flag_values)
    flag_values(["bench.py", f"--json={tmp_path}/gpu.json"])
    monkeypatch.setattr(flags, "FLAGS", flag_values)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert refusal(bench.main, "gpu").startswith("no GPU: ")


def test_gpu_benchmark_rows_cover_the_flags_of_loader_and_step():
    rows = gpu.all_rows(cores=64, gpus=8)
    assert len({row.name for row in rows}) == len(rows) > 40
    for app in gpu.BATCH_SIZES:
        options = {
            role: [row.flags for row in rows if (row.app, row.role) == (app, role)]
            for role in (LOADER, STEP, BOTH)
        }
        assert options[LOADER][0] == {}
        names = {name for each in options[LOADER] for name in each}
        assert names >= {"hw_decoder_load", "batch_size", "fancy_upsampling", "roi_decoding"}
        threads = {each.get("num_threads", args.default_threads()) for each in options[LOADER]}
        assert threads == {2, args.default_threads(), 8, 64}
        assert {row.role for row in rows if row.app == app} > {TF_DATA, EVALUATION, *exports.ROLES}
        assert len(options[STEP]) == 7 and options[BOTH] == options[STEP][2:4]
    for row in rows:
        BenchArgs(**row.flags)


# --- the verdict ---


def verdict_of(*rates: tuple[Row, float | str]) -> list[str]:
    """`rates` has the images/s of each row, or the error of a row that failed."""
    results = {
        row.name: {"error": rate} if isinstance(rate, str) else {"images_per_second": {"median": rate}}
        for row, rate in rates
    }
    return gpu.verdict([row for row, _ in rates], {"candidates": results, "inference": {}})


def loader(rate: float | str, **options) -> tuple[Row, float | str]:
    return Row("yolov4", LOADER, options), rate


def step(rate: float, precision: str = "float32", role: str = STEP, **options) -> tuple[Row, float]:
    return Row("yolov4", role, {"precision": precision, **options}), rate


def tf_data(rate: float) -> tuple[Row, float]:
    return Row("yolov4", TF_DATA, {}), rate


DEFAULT = "the loader makes 1000 images/s with its default flags."
VERDICTS = {
    "loader with default flags": ([loader(1000.0)], [DEFAULT, "faster loaders: none."]),
    "tf.data slower than the step": (
        [loader(1000.0), tf_data(400.0), step(900.0)],
        [
            "Does DALI help here? yes, training would wait for tf.data: DALI loads 1000 images/s, "
            "tf.data 400, and the fastest step takes 900.",
            *(DEFAULT, "faster loaders: none."),
            "train with --precision=float32: the step makes 900 images/s.",
        ],
    ),
    "faster loaders": (
        [loader(1000.0), loader(1040.0, num_threads=2), loader(1100.0, num_threads=4)]
        + [loader(1500.0, batch_size=8)],
        [DEFAULT, "faster loaders: --batch_size=8 (1.50 times), --num_threads=4 (1.10 times)."],
    ),
    "gain of the step too small": (
        [step(100.0), step(104.0, xla=True)],
        ["train with --precision=float32: the step makes 100 images/s."],
    ),
    "faster step": (
        [step(100.0), step(104.0, xla=True), step(180.0, "mixed_bfloat16")],
        ["train with --precision=mixed_bfloat16: the step makes 180 images/s."],
    ),
    "loader slower than step": (
        [loader(1000.0), step(1100.0), step(700.0, role=BOTH)],
        [
            *(DEFAULT, "faster loaders: none."),
            "train with --precision=float32: the step makes 1100 images/s.",
            "with --precision=float32, loader and step together make 700 images/s, 70% of the slower, "
            "which is the loader.",
        ],
    ),
}


@pytest.mark.parametrize(
    ("rates", "answer"),
    [
        ((1000.0, 800.0, 700.0), "no, tf.data is already faster than the step"),
        ((410.0, 400.0, 700.0), "no, it loads no faster than tf.data, for which training would wait"),
        ((500.0, 400.0, 390.0), "yes, training would wait for tf.data"),
    ],
)
def test_gpu_benchmark_answers_whether_dali_helps(rates, answer):
    assert gpu.does_dali_help(*rates).startswith(f"Does DALI help here? {answer}: ")


def test_gpu_benchmark_verdict_names_the_export_with_the_lowest_latency_at_each_batch_size():
    latencies = {"onnx:none": (2.0, 30.0), "tensorrt:fp16": (1.0, 40.0)}
    results = {
        f"yolov4 export:{kind}": [
            {"batch_size": 1, "latency_ms": one},
            {"batch_size": 16, "latency_ms": all_},
        ]
        for kind, (one, all_) in latencies.items()
    }
    results["yolov4 export:tensorrt:int8"] = {"error": "no memory"}
    assert gpu.verdict([], {"candidates": {}, "inference": results}) == [
        "yolov4: fastest export at batch 1: tensorrt:fp16, 1 ms per batch.",
        "yolov4: fastest export at batch 16: onnx:none, 30 ms per batch.",
        "yolov4 export:tensorrt:int8: failed: no memory",
    ]


@pytest.mark.parametrize(("rates", "lines"), VERDICTS.values(), ids=VERDICTS)
def test_gpu_benchmark_verdict_names_the_flags_that_pay(rates, lines):
    assert verdict_of(*rates) == [f"yolov4: {line}" for line in lines]


def test_gpu_benchmark_verdict_without_the_default_row_has_only_its_failure():
    lines = verdict_of(loader("killed"), loader(1000.0, num_threads=4), step(9.0, role=BOTH))
    assert lines == ["yolov4 data:dali_gpu: failed: killed"]
