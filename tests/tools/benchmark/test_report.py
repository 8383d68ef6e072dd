"""Tests the tables, the verdict and the comparison of report.py, and the numbers in them."""

import pytest

from tools.benchmark import report, rounds
from tools.benchmark.rounds import Window
from tools.benchmark.stages import Cost, summarize


def candidate(*rates, cpu_ms, seconds=10.0):
    """`rates` are the images/s of the rounds; `cpu_ms` is per image."""
    windows = [Window(round(seconds * rate), seconds, seconds * rate * cpu_ms / 1000) for rate in rates]
    return rounds.summarize(windows, 500_000_000)


def record_of(candidates: dict, stages: dict | None = None) -> dict:
    record = {
        "title": "net at 512x512",
        "data": {"summary": "12 images"},
        "machine": {"cpu": "some CPU", "cores": 2.0, "gpus": ["H100"]},
        "candidates": candidates,
        "stages": stages or {},
        "inference": {},
        "other_cores": report.other_cores(candidates),
    }
    return record | {"verdict": report.verdict(record)}


def test_benchmark_summary_has_median_and_range_of_the_rounds():
    windows = [Window(100, 10.0, 5.0), Window(40, 5.0, 4.0), Window(120, 10.0, 9.0)]
    summary = rounds.summarize(windows, 7)
    assert summary["images_per_second"] == {"median": 10.0, "min": 8.0, "max": 12.0}
    assert summary["cpu_ms_per_image"] == pytest.approx({"median": 75.0, "min": 50.0, "max": 100.0})
    assert summary["cores"] == pytest.approx({"median": 0.8, "min": 0.5, "max": 0.9})
    assert summary["peak_bytes"] == 7 and len(summary["windows"]) == 3


def test_cost_of_a_benchmark_stage_is_the_difference_to_the_stage_before_in_each_round():
    def costs(*values):  # for a batch of two images; each value is (CPU ms, ms) per image
        return {
            stage: Cost(2 * cpu, 2 * ms, 9)
            for stage, (cpu, ms) in zip(("read", "decode", "end"), values, strict=True)
        }

    all_rounds = [costs((1.0, 2.0), (4.0, 4.0), (6.0, 5.0)), costs((2.0, 2.0), (6.0, 5.0), (7.0, 5.0))]
    stages = summarize(all_rounds, 2)
    assert [(stage["stage"], stage["cpu_ms_per_image"]) for stage in stages] == [
        ("read", {"median": 1.5, "min": 1.0, "max": 2.0}),
        ("decode", {"median": 3.5, "min": 3.0, "max": 4.0}),
        ("end", {"median": 1.5, "min": 1.0, "max": 2.0}),
    ]
    assert stages[2]["cpu_ms_so_far"] == 6.5 and stages[2]["images_per_second"] == 200.0
    (row,) = [line.split() for line in report.stage_table("dali_cpu", stages).splitlines() if "54%" in line]
    assert row == ["decode", "3.5", "(3..4)", "54%", "5", "225"]


def test_benchmark_tables_list_rates_failures_and_verdict():
    candidates = {
        "data dali_gpu": {"error": "needs a GPU"},
        "data dali_cpu": candidate(60, 62, 50, cpu_ms=30),
        "model": candidate(3, 3.1, 3.2, cpu_ms=600),
        "both dali_cpu": candidate(2.8, 2.8, 2.8, cpu_ms=700),
    }
    record = record_of(candidates, stages={"dali_cpu": {"error": "killed"}})
    lines = report.tables(record).splitlines()
    assert lines[:2] == ["net at 512x512", "some CPU, 2 cores, H100; 12 images"]
    assert lines[3].endswith("x data dali_cpu")
    (row,) = [line.split() for line in lines if line.startswith("data dali_cpu")]
    assert row == ["data", "dali_cpu", "60", "(50..62)", "30", "(30..30)", "1.80", "500", "1"]
    (row,) = [line.split() for line in lines if line.startswith("model")]
    assert row[1:3] == ["3.1", "(3..3.2)"] and float(row[-1]) == pytest.approx(0.05, abs=0.02)
    assert "data dali_gpu: failed: needs a GPU" in lines
    assert "stages of dali_cpu: failed: killed" in lines
    rates = "(the loader 60, the model 3.1, the CPU that they share 3.17, together 2.8 images/s)"
    assert [rates in line for line in record["verdict"]] == [True] and lines[-1] == record["verdict"][0]


def test_benchmark_ratios_are_medians_over_rounds_and_the_table_has_those_to_the_first_baseline():
    """The ratios of the rounds are 4, 5 and 2. The ratio of the medians would be 70 / 16."""
    candidates = {
        "data dali_cpu": candidate(60, 80, 70, cpu_ms=33, seconds=5.0),
        "baseline automl": candidate(15, 16, 35, cpu_ms=66),
        "baseline other": candidate(15, 16, 35, cpu_ms=66),
    }
    lines = report.tables(record_of(candidates)).splitlines()
    assert lines[3].endswith("x baseline automl")
    assert lines[4].split()[-1] == "4"
    assert report.ratios(candidates)["baseline automl"]["data dali_cpu"] == 0.25


LIMITS = [
    ((50, 20), (400, 0.5), "the loader", "--num_threads"),
    ((3000, 0.2), (400, 0.5), "the model", "a larger --batch_size"),
    ((60, 33), (3, 660), "the CPU that they share", "a smaller --image_size"),
]


@pytest.mark.parametrize(("data", "model", "limit", "advice"), LIMITS, ids=["loader", "model", "CPU"])
def test_benchmark_verdict_names_what_limits_training_and_the_flag_to_change(data, model, limit, advice):
    """`data` and `model` are (images/s, CPU ms per image)."""
    data, model = (candidate(rate, cpu_ms=cpu_ms) for rate, cpu_ms in (data, model))
    (line,) = record_of({"data dali_cpu": data, "model": model})["verdict"]
    assert line.startswith(f"dali_cpu: {limit} limits training") and advice in line
    assert "together" not in line


@pytest.mark.parametrize(("cpu_seconds", "is_reported"), [(6.0, True), (2.0, False)])
def test_benchmark_reports_other_processes_that_use_more_than_a_tenth_of_the_cores(cpu_seconds, is_reported):
    """Without a model, the verdict has nothing else."""
    windows = [Window(100, 10.0, 15.0, seconds) for seconds in (1.0, cpu_seconds, 7.0)]
    record = record_of({"data dali_cpu": rounds.summarize(windows, 1), "model": {"error": "killed"}})
    line = "Other processes used 0.6 of 2 cores: measure again on an idle machine."
    assert record["verdict"] == [line] * is_reported


def test_benchmark_table_of_inference_times_has_one_column_per_batch_size():
    stages = {"network": {"wall_ms": 40.0}, "post-processing": {"wall_ms": 4.25}}
    times = {"stages": stages, "latency_ms": 44.25, "images_per_second": 123.4}
    times = [{"batch_size": size, **times} for size in (1, 8)]
    lines = [line.split() for line in report.inference_table("dali_cpu", times).splitlines()]
    assert lines[0][-4:] == ["batch", "1", "batch", "8"]
    assert lines[1] == ["network", "40.0", "40.0"] and lines[2] == ["post-processing", "4.2", "4.2"]
    assert lines[4] == ["overlapped,", "images/s", "123", "123"]
