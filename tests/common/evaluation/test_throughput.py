import pytest

from common.args import EvalArgs
from common.evaluation import commands


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    times = [100.0]
    monkeypatch.setattr(commands.time, "monotonic", lambda: times[0])
    return times


def test_compiling_and_what_was_loaded_meanwhile_do_not_count(clock):
    meter = commands.Throughput(EvalArgs(batch_size=8, prefetch=2))
    for done, now in enumerate((160.0, 160.1, 160.2, 161.0, 163.2), start=1):
        clock[0] = now
        meter(done, 5)
    clock[0] = 999.0  # pictures are drawn
    assert meter.describe(38).startswith("4.7 images/s from file to boxes")  # 8 + 6 images in 3 s


def test_few_batches_have_seconds_and_no_rate(clock):
    meter = commands.Throughput(EvalArgs(batch_size=8, prefetch=2))
    for done, now in ((1, 112.0), (2, 112.5)):
        clock[0] = now
        meter(done, 2)
    assert meter.describe(9) == "9 images in 12.5 s, compiling included"
