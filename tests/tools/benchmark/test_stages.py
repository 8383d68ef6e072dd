import queue
import threading
import time

import pytest

from tools.benchmark import stages


def burn(seconds: float) -> None:
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def test_benchmark_cost_of_a_batch_is_the_cpu_time_of_the_thread_that_makes_it():
    """Batches that were made but never fetched are not counted."""
    batches: queue.Queue = queue.Queue(maxsize=3)

    def make_batches() -> None:
        for _ in range(1000):
            burn(0.02)
            batches.put(None)

    threading.Thread(target=make_batches, daemon=True).start()
    cost = stages.cost(batches.get, seconds=0.2, settle=4)
    assert cost.cpu_ms == pytest.approx(20.0, rel=0.25)
    assert cost.ms >= 18
