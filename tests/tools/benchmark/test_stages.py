import queue
import threading
import time

import pytest

from tools.benchmark import stages


def burn(seconds: float) -> None:
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def test_the_cost_of_a_batch_is_that_of_making_it_wherever_it_is_made():
    """Batches that were made but never fetched are not counted."""
    ready: queue.Queue = queue.Queue(maxsize=3)
    made = []

    def make() -> None:
        while True:
            burn(0.02)
            made.append(None)
            if ready.put(None) or len(made) > 1000:
                return

    threading.Thread(target=make, daemon=True).start()
    cost = stages.cost(ready.get, seconds=0.2, settle=4)
    assert cost.cpu_ms == pytest.approx(20.0, rel=0.25)
    assert cost.ms >= 18


def test_work_of_the_caller_counts():
    cost = stages.cost(lambda: burn(0.01), seconds=0.1, settle=1)
    assert cost.cpu_ms == pytest.approx(10.0, rel=0.25)
