"""Tests report.py, and the numbers that it prints."""

import pytest

from tools.benchmark import report, rounds
from tools.benchmark.rounds import Window
from tools.benchmark.stages import Cost, summarize

CORES = 2.0


def candidate(*rates, cpu_ms, peak=500_000_000, seconds=10.0):
    windows = [Window(round(seconds * rate), seconds, seconds * rate * cpu_ms / 1000) for rate in rates]
    return rounds.summarize(windows, peak)


def record(stages: dict | None = None, **candidates) -> dict:
    found = {name.replace("_", " ", 1): each for name, each in candidates.items()}
    made = {"title": "net at 512x512", "data": {"summary": "12 images"}, "stages": stages or {}}
    made["machine"] = {"cpu": "some CPU", "cores": CORES, "gpus": ["H100"]}
    made |= {"candidates": found, "inference": {}, "other_cores": report.other_cores(found)}
    return made | {"verdict": report.verdict(made)}


def test_numbers_of_a_candidate():
    windows = [Window(100, 10.0, 5.0), Window(40, 5.0, 4.0), Window(120, 10.0, 9.0)]
    found = rounds.summarize(windows, 7)
    assert found["images_per_second"] == {"median": 10.0, "min": 8.0, "max": 12.0}
    assert found["cpu_ms_per_image"] == pytest.approx({"median": 75.0, "min": 50.0, "max": 100.0})
    assert found["cores"] == pytest.approx({"median": 0.8, "min": 0.5, "max": 0.9})
    assert found["peak_bytes"] == 7 and len(found["windows"]) == 3


def test_ratios_are_the_median_of_the_rounds_not_the_ratio_of_medians():
    first, second = candidate(10, 40, 20, cpu_ms=1), candidate(20, 10, 10, cpu_ms=1, seconds=5.0)
    assert report.ratio(first, second) == pytest.approx(2.0)


def test_stages_are_differences_round_by_round():
    def costs(*values):  # for a batch of two images; each value is (CPU ms, ms) per image
        made = [Cost(2 * cpu, 2 * ms, 9) for cpu, ms in values]
        return dict(zip(("read", "decode", "end"), made, strict=True))

    all_rounds = [costs((1.0, 2.0), (4.0, 4.0), (6.0, 5.0)), costs((2.0, 2.0), (6.0, 5.0), (7.0, 5.0))]
    stages = summarize(all_rounds, 2)
    found = {stage["stage"]: stage for stage in stages}
    assert found["read"]["cpu_ms_per_image"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert found["decode"]["cpu_ms_per_image"] == {"median": 3.5, "min": 3.0, "max": 4.0}
    assert found["end"]["cpu_ms_per_image"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert found["end"]["cpu_ms_so_far"] == 6.5 and found["end"]["images_per_second"] == 200.0
    (row,) = [line.split() for line in report.stage_table("dali_cpu", stages).splitlines() if "54%" in line]
    assert row == ["decode", "3.5", "(3..4)", "54%", "5", "225"]


def test_the_table_and_the_verdict_have_all_and_say_what_failed():
    made = record(
        data_dali_gpu={"error": "needs a GPU"},
        data_dali_cpu=candidate(60, 62, 50, cpu_ms=30),
        model=candidate(3, 3.1, 3.2, cpu_ms=600),
        both_dali_cpu=candidate(2.8, 2.8, 2.8, cpu_ms=700),
        stages={"dali_cpu": {"error": "killed"}},
    )
    lines = report.tables(made).splitlines()
    assert lines[:2] == ["net at 512x512", "some CPU, 2 cores, H100; 12 images"]
    assert lines[3].endswith("x data dali_cpu")
    (row,) = [line.split() for line in lines if line.startswith("data dali_cpu")]
    assert row == ["data", "dali_cpu", "60", "(50..62)", "30", "(30..30)", "1.80", "500", "1"]
    (row,) = [line.split() for line in lines if line.startswith("model")]
    assert row[1:3] == ["3.1", "(3..3.2)"] and float(row[-1]) == pytest.approx(0.05, abs=0.02)
    assert "data dali_gpu: failed: needs a GPU" in lines
    assert "stages of dali_cpu: failed: killed" in lines
    rates = "(the loader 60, the model 3.1, the CPU that they share 3.17, together 2.8 images/s)"
    assert [rates in line for line in made["verdict"]] == [True] and lines[-1] == made["verdict"][0]


def test_candidates_are_compared_with_the_first_baseline():
    made = record(
        data_dali_cpu=candidate(60, 80, 70, cpu_ms=33),
        baseline_automl=candidate(15, 16, 35, cpu_ms=66),
        baseline_other=candidate(15, 16, 35, cpu_ms=66),
    )
    lines = report.tables(made).splitlines()
    assert lines[3].endswith("x baseline automl")
    assert lines[4].split()[-1] == "4"
    assert report.ratios(made["candidates"])["baseline automl"]["data dali_cpu"] == 0.25


LIMITS = [
    ((50, 20), (400, 0.5), "the loader", "--num_threads"),
    ((3000, 0.2), (400, 0.5), "the model", "a larger --batch_size"),
    ((60, 33), (3, 660), "the CPU that they share", "a smaller --image_size"),
]


@pytest.mark.parametrize(("data", "model", "limit", "advice"), LIMITS)
def test_verdict_names_what_limits_and_the_flag(data, model, limit, advice):
    """`data` and `model` are (images/s, CPU ms per image)."""
    data, model = (candidate(rate, cpu_ms=cpu_ms) for rate, cpu_ms in (data, model))
    (line,) = record(data_dali_cpu=data, model=model)["verdict"]
    assert line.startswith(f"dali_cpu: {limit} limits training") and advice in line
    assert "together" not in line


def test_verdict_says_that_other_work_ran_and_nothing_more_without_a_model():
    """Other processes are reported if they used more than a tenth of the cores."""
    told = "Other processes used 0.6 of 2 cores: measure again on an idle machine."
    for other, verdict in ((6.0, [told]), (2.0, [])):
        windows = [Window(100, 10.0, 15.0, seconds) for seconds in (1.0, other, 7.0)]
        busy = rounds.summarize(windows, 1)
        assert record(data_dali_cpu=busy, model={"error": "killed"})["verdict"] == verdict


def test_the_table_of_inference():
    stages = {"network": {"wall_ms": 40.0}, "post-processing": {"wall_ms": 4.25}}
    times = {"stages": stages, "latency_ms": 44.25, "images_per_second": 123.4}
    times = [{"batch_size": size, **times} for size in (1, 8)]
    lines = [line.split() for line in report.inference_table("dali_cpu", times).splitlines()]
    assert lines[0][-4:] == ["batch", "1", "batch", "8"]
    assert lines[1] == ["network", "40.0", "40.0"] and lines[2] == ["post-processing", "4.2", "4.2"]
    assert lines[4] == ["overlapped,", "images/s", "123", "123"]
