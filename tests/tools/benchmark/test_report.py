"""Numbers, tables and verdicts from made-up rounds."""

import copy

import pytest

from tools.benchmark import report, summary
from tools.benchmark.stages import Cost, Cut, summarize
from tools.benchmark.summary import Window

CORES = 2.0


def candidate(*rates: float, cpu_ms: float, peak: int = 500_000_000) -> dict:
    """What runs at these rates, with so much CPU time an image: windows of 10 s."""
    windows = [Window(round(10 * rate), 10.0, 10 * rate * cpu_ms / 1000) for rate in rates]
    return summary.candidate(windows, peak)


def record(gpus: tuple[str, ...] = (), threads: int = 2, stages: dict | None = None, **candidates) -> dict:
    found = {name.replace("_", " ", 1): each for name, each in candidates.items()}
    made = {
        "title": "net at 512x512",
        "machine": {"cpu": "some CPU", "cores": CORES, "gpus": list(gpus)},
        "data": {"summary": "12 images"},
        "settings": {"num_threads": threads, "prefetch": 2},
        "candidates": found,
        "stages": stages or {},
        "inference": {},
        "other_cores": summary.other_cores(found),
    }
    return made | {"verdict": report.verdict(made)}


def test_numbers_of_a_candidate():
    windows = [Window(100, 10.0, 5.0), Window(40, 5.0, 4.0), Window(120, 10.0, 9.0)]
    found = summary.candidate(windows, 7)
    assert found["images_per_second"] == {"median": 10.0, "min": 8.0, "max": 12.0}
    assert found["cpu_ms_per_image"] == pytest.approx({"median": 75.0, "min": 50.0, "max": 100.0})
    assert found["cores"] == pytest.approx({"median": 0.8, "min": 0.5, "max": 0.9})
    assert found["peak_bytes"] == 7 and len(found["windows"]) == 3


def test_ratios_are_the_median_of_the_rounds_not_the_ratio_of_medians():
    first, second = candidate(10, 20, 60, cpu_ms=1), candidate(10, 10, 20, cpu_ms=1)
    assert summary.ratio(first, second) == pytest.approx(2.0)  # medians: 20 / 10; rounds: 1, 2, 3
    first, second = candidate(10, 40, 20, cpu_ms=1), candidate(20, 10, 20, cpu_ms=1)
    assert summary.ratio(first, second) == pytest.approx(1.0)  # rounds: 0.5, 4, 1


def test_stages_are_differences_round_by_round():
    def cost(*values):
        return {cut.stage: Cost(*each) for cut, each in zip(cuts, values, strict=True)}

    cuts = [Cut("read", int), Cut("decode", int), Cut("op", int, "decode"), Cut("end", int)]
    rounds = [
        cost((1.0, 2.0), (4.0, 4.0), (14.0, 9.0), (6.0, 5.0)),
        cost((2.0, 2.0), (6.0, 5.0), (12.0, 9.0), (7.0, 5.0)),
    ]
    found = {stage["stage"]: stage for stage in summarize(cuts, rounds)}
    assert found["read"]["cpu_ms_per_image"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert found["decode"]["cpu_ms_per_image"] == {"median": 3.5, "min": 3.0, "max": 4.0}
    assert found["op"]["cpu_ms_per_image"] == {"median": 8.0, "min": 6.0, "max": 10.0}
    assert found["end"]["cpu_ms_per_image"] == {"median": 1.5, "min": 1.0, "max": 2.0}  # after decode
    assert found["end"]["cpu_ms_so_far"] == 6.5 and found["end"]["images_per_second"] == 200.0
    text = report.stage_table("dali_cpu", list(found.values()))
    assert (
        "(op)" in text
        and "54%" in text
        and report.verdict(record(stages={"dali_cpu": list(found.values())}))
        == ["Of the 6.5 ms of CPU that dali_cpu spends on an image: decode 54%, read 23%, end 23%."]
    )


def test_the_table_has_all_and_says_what_failed():
    made = record(
        data_dali_gpu={"error": "needs a GPU"},
        data_dali_cpu=candidate(60, 62, 50, cpu_ms=30),
        model=candidate(3, 3.1, 3.2, cpu_ms=600),
    )
    text = report.tables(made)
    lines = text.splitlines()
    assert "x data dali_cpu" in text
    (row,) = [line.split() for line in lines if line.startswith("data dali_cpu")]
    assert row == ["data", "dali_cpu", "60", "50..62", "30", "30..30", "1.80", "500", "1"]
    (row,) = [line.split() for line in lines if line.startswith("model")]
    assert row[1:3] == ["3.1", "3..3.2"] and float(row[-1]) == pytest.approx(0.05, abs=0.02)
    assert "data dali_gpu: failed: needs a GPU" in lines


def test_verdict_where_the_model_is_slow_and_shares_the_cores():
    made = record(
        data_dali_cpu=candidate(60, 60, cpu_ms=33),
        model=candidate(3, 3, cpu_ms=660),
        both_dali_cpu=candidate(2.8, 2.8, cpu_ms=700),
    )
    (line,) = made["verdict"]
    assert (
        "the loader alone makes 60 images/s, the model alone takes 3: the loader waits for the model" in line
    )
    assert "33 + 660 ms of CPU an image allow 2.89 images/s" in line
    assert "Together 2.8, 97% of what the CPU allows." in line
    assert "The loader takes 5% of the CPU time. No flag gives more." in line


def test_verdict_where_they_are_in_each_others_way():
    made = record(
        data_dali_cpu=candidate(60, 60, cpu_ms=33),
        model=candidate(30, 30, cpu_ms=60),
        both_dali_cpu=candidate(15, 15, cpu_ms=100),
    )
    (line,) = made["verdict"]
    assert "70% of what the CPU allows" in line  # 15 of 2 / 93 ms = 21.5
    assert "fewer --num_threads" in line and "--prefetch=4" in line


SLOW_LOADERS = {
    "threads": ({"threads": 1}, candidate(50, 50, cpu_ms=20), "--num_threads=2"),
    "cores": ({"threads": 2}, candidate(50, 50, cpu_ms=39), "The loader uses all cores"),
    "disk": ({"threads": 2}, candidate(50, 50, cpu_ms=10), "it waits, most likely for the disk"),
    "gpu": ({"gpus": ("H100",)}, candidate(50, 50, cpu_ms=20), "--pipeline_type=dali_gpu"),
}


@pytest.mark.parametrize("why", SLOW_LOADERS)
def test_verdict_where_the_loader_is_slow(why):
    options, data, advice = SLOW_LOADERS[why]
    made = record(**options, data_dali_cpu=data, model=candidate(400, 400, cpu_ms=0.5))
    (line,) = made["verdict"]
    assert "the model waits for the loader" in line and advice in line


def test_verdict_where_a_gpu_is_busy_all_the_time():
    made = record(
        gpus=("H100",),
        data_dali_gpu=candidate(3000, 3000, cpu_ms=0.2),
        model=candidate(400, 400, cpu_ms=0.5),
        both_dali_gpu=candidate(398, 398, cpu_ms=0.8),
    )
    (line,) = made["verdict"]
    assert "the loader waits for the model" in line and "of the model's rate" in line
    assert "A larger --batch_size" in line and "cores" not in line


def test_verdict_compares_loaders_and_knows_what_is_no_difference():
    made = record(
        data_dali_cpu=candidate(60, 60, cpu_ms=33),
        data_tensorflow=candidate(30, 30, cpu_ms=66),
        model=candidate(3, 3, cpu_ms=660),
        both_dali_cpu=candidate(2.9, 2.9, cpu_ms=700),
        both_tensorflow=candidate(2.8, 2.8, cpu_ms=720),
    )
    assert made["verdict"][-1] == (
        "dali_cpu against tensorflow: 2.00x alone, 1.04x in training (no difference)."
    )


def test_verdict_says_that_other_work_ran():
    windows = [Window(100, 10.0, 15.0, other) for other in (1.0, 6.0, 7.0)]
    busy = summary.candidate(windows, 1)
    assert record(data_dali_cpu=busy)["verdict"] == [
        "Other work took 0.6 of 2 cores: measure again where nothing else runs."
    ]
    assert record(data_dali_cpu=candidate(10, cpu_ms=1))["verdict"] == []


def test_verdict_compares_with_baselines():
    made = record(
        data_dali_cpu=candidate(60, 80, 70, cpu_ms=33),
        model={"error": "killed"},
        baseline_automl=candidate(15, 16, 35, cpu_ms=66),
    )
    assert made["verdict"] == ["Against baseline automl: data dali_cpu 4x."]  # rounds: 4, 5, 2
    assert summary.ratios(made["candidates"]) == {
        "data dali_cpu": {"baseline automl": 4.0},
        "baseline automl": {"data dali_cpu": 0.25},
    }


def test_a_failed_candidate_does_not_stop_the_verdict():
    made = record(
        data_dali_cpu=candidate(60, 60, cpu_ms=33),
        model=candidate(3, 3, cpu_ms=660),
        both_dali_cpu={"error": "killed"},
    )
    (line,) = made["verdict"]
    assert "the loader waits for the model" in line and "Together" not in line
    assert report.verdict(copy.deepcopy(made) | {"candidates": {"model": {"error": "killed"}}}) == []


def test_the_table_of_inference():
    stages = {"network": {"wall_ms": 40.0}, "post-processing": {"wall_ms": 4.25}}
    times = [
        {"batch_size": size, "stages": stages, "latency_ms": 44.25, "images_per_second": 123.4}
        for size in (1, 8)
    ]
    lines = [line.split() for line in report.inference_table("dali_cpu", times).splitlines()]
    assert lines[0][-4:] == ["batch", "1", "batch", "8"]
    assert lines[1] == ["network", "40.0", "40.0"] and lines[2] == ["post-processing", "4.2", "4.2"]
    assert lines[4] == ["overlapped,", "images/s", "123", "123"]
    assert report.inference_table("dali_gpu", {"error": "no GPU"}) == (
        "inference with dali_gpu: failed: no GPU"
    )
